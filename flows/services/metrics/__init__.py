"""The server of a pool's metrics, for Prometheus."""
