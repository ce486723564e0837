"""A training endpoint: clients of the Tinker API train adapters of one base on this machine, many at once.

`ringmaster serve FILE` answers the client `tinker` unedited. Clients own their loops; each adapter gets the bits that
it would get alone. `server` answers requests, `compute` trains and samples for them. What a request is, from its bytes
to its answer, in `server`, which `endpoint_server` starts and ends:

    server_app        HTTP routes: keys, bounds, and the forms of messages (`messages` JSON, `binary_messages` protobuf)
    endpoint_service  checks a request, whatever its form, stores it, and finds its answer
    store             requests, answers, sessions and checkpoints in a SQLite file, which outlives the server
    scheduler         a thread for each base that computes waiting requests of several clients together, in fair shares
    compute_link      the process that has the base and the adapters, started again where it has died
"""

TECHNIQUES = {"endpoint": "ringmaster.features.endpoint.compute.gang_technique:Served"}
FORMER_TECHNIQUES = {"ringmaster.techniques.serving.gang_technique:Served": TECHNIQUES["endpoint"]}
