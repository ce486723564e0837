"""The automation that detects flow runs whose machine has died, by their silence."""

from prefect.events.schemas.automations import Posture

from ringmaster.flows.deployments import AUTOMATION, make_automation


class Client:
    """A Prefect server that has no automation yet."""

    def __init__(self):
        self.made = []

    def read_automations_by_name(self, name):
        return [each for each in self.made if each.name == name]

    def create_automation(self, automation):
        self.made.append(automation)


def test_a_run_that_waits_for_a_person_is_not_taken_for_dead():
    client = Client()
    make_automation(client)
    (automation,) = client.made
    assert automation.name == AUTOMATION
    assert automation.trigger.posture is Posture.Proactive
    assert automation.trigger.after == {"prefect.flow-run.heartbeat"}
    assert {"prefect.flow-run.Suspended", "prefect.flow-run.Paused"} <= automation.trigger.expect
