#!/bin/bash
# The batch job of a flow run. Sites may edit this script in the work pool, on Prefect's page "Work Pools". It gets:
#   FLOW_RUN_COMMAND   the command that runs the flow run
#   JOB_IS_SHARED      1 if other jobs may run on this node; a node of the pool is then named after its job
# Lines that begin with @DIRECTIVE@, directly below this text, are further options of the job.

# The traps come first: nothing that takes time may run before them. SIGTERM and SIGUSR1 (the notice before the end of
# the time limit) end the flow run in order.
child= is_ending=
end() {
    is_ending=1
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
trap end TERM USR1

# A requeued job ends at once: another one has been requested in its place.
[ "@RESTARTS@" -eq 0 ] || exit 0

# What a site needs before Python starts belongs here, such as: module load cuda

export RINGMASTER_ALLOCATION="@ENGINE@:@JOB@"
export RINGMASTER_NODE="@NODE@${JOB_IS_SHARED:+-@JOB@}"

[ -z "$is_ending" ] || exit 0
bash -c "exec $FLOW_RUN_COMMAND" &
child=$!
[ -z "$is_ending" ] || kill -TERM "$child"
# A signal ends `wait` before the child has ended.
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
done
wait "$child"
status=$?
# Of a child that ended while a signal was handled, bash does not know the status. It has ended as it was asked to.
[ -z "$is_ending" ] || exit 0
exit "$status"
