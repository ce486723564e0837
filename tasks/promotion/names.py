"""The aliases of a registered model.

`champion` serves. `previous` is the champion before it, to go back to. `challenger` is the version that was compared
last, whether it won or not, or that a sweep proposes. A newer version than the champion and than a challenger about
which a decision is kept is a candidate that was not compared yet.
"""

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
