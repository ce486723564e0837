"""The execution of plans: a journaled state machine that leases devices, starts gangs and reads their outcomes."""
