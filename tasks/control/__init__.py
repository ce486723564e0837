"""Control of running jobs: the requests of people and flows about them, and what these may change."""
