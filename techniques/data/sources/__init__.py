"""Kinds of data: the implementations of `DataSource`, found by `interface.data_source.data_source_named`."""
