"""What techniques are built from: buckets, shards, pipeline stages, and sequences and tensors divided over devices.

The techniques themselves are the modules of `ringmaster.techniques`, such as `ddp` and `tensor_parallel`.
"""
