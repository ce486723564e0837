"""Static buffers are reused by one owner after another."""

import torch

from ringmaster.techniques.sharding.buckets import BufferPool


def take(pool, num_elements, *, dtype=torch.float32):
    return pool.take((num_elements,), dtype=dtype, device=torch.device("cpu"))


def test_a_buffer_is_used_again_once_its_owner_has_let_go_of_it():
    pool = BufferPool()
    first = take(pool, 8)
    address = first.data_ptr()
    part = first[2:4]
    del first
    assert take(pool, 8).data_ptr() != address  # a view of it is still in use
    del part
    one, other = take(pool, 8), take(pool, 8)
    assert address in (one.data_ptr(), other.data_ptr())
    assert one.data_ptr() != other.data_ptr()
    assert pool.num_bytes == 2 * 8 * 4


def test_each_size_and_dtype_has_its_own():
    pool = BufferPool()
    for dtype in (torch.float32, torch.bfloat16):
        for num_elements in (4, 8):
            assert take(pool, num_elements, dtype=dtype).shape == (num_elements,)
    assert pool.num_bytes == (4 + 8) * (4 + 2)
