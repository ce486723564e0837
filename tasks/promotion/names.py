"""The aliases of a registered model.

`champion` serves. `previous` is the champion before it, to go back to. `challenger` is the version that was compared
last, whether it won or not; a newer version than both is a candidate that was trained but not compared yet.
"""

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
