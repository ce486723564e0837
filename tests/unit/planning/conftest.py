import pytest

from tasks.planning.pieces import PieceSearch
