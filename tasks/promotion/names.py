"""The aliases of a registered model.

`champion` is the version that serves. `previous` is the champion before it, the target of a rollback. `challenger` is
the version that was compared last, with either result, or that a sweep proposes. A version newer than the champion, and
newer than any challenger with a recorded decision, is a candidate that has not been compared yet.
"""

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
