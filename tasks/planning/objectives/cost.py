"""Cost: the price of the devices for as long as jobs hold them."""

from ringmaster.tasks.planning.objectives.objective import Coefficients, Objective
from ringmaster.tasks.planning.problems.problem import Problem


class Cost(Objective):
    """The price of the devices for as long as jobs hold them."""

    name = "cost"

    def coefficients(self, problem: Problem) -> Coefficients:
        """Returns the price of each node's devices."""
        return Coefficients(prices={node.id: node.price for node in problem.nodes})
