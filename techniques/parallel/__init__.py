"""Building blocks of techniques: buckets, shards, pipeline stages, and sequences and tensors divided over devices."""
