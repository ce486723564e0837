"""Kinds of data: the implementations of `DataSource`, found by `techniques.data_source.data_source_named`."""
