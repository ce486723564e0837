"""A pool's flow runs in Prefect, of batches and of segments, and their recovery when one of them ends early."""
