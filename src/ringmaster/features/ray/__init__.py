"""The engine `ray`, whose nodes are actors of a Ray cluster: an existing one, or one of this machine alone."""

ADDRESS, DEVICES = "RINGMASTER_RAY_ADDRESS", "RINGMASTER_RAY_DEVICES"
"""Environment variables for the address of the Ray cluster, as `ray.init` takes it, and for the devices of a node."""

LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's environment variable that, at 0, lets a cluster of one machine use 127.0.0.1 on Linux, too."""

ENGINES = {"ray": "ringmaster.features.ray.ray_engine:RayOptions"}
