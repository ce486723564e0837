"""The command `ringmaster lineage bisect`."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from ringmaster.flows.lineage.home import Model, Refresh, lineage_home
from ringmaster.flows.output import AsJson, notice, output_console, print_json, print_lines


def bisect(
    model: Model,
    test: Annotated[
        str,
        typer.Option(
            help="Shell command, given the model's folder, that ends with 0 for a good one, with 125 for one that "
            "cannot be tested; or loss<2.5."
        ),
    ],
    every: Annotated[bool, typer.Option("--all", help="Test all of them: faults may come and go.")] = False,
    checkpoints: Annotated[bool, typer.Option(help="Search the culprit's checkpoints too.")] = True,
    forget: Annotated[bool, typer.Option("--anew", help="Discard the results of an interrupted search.")] = False,
    record: Annotated[bool, typer.Option(help="Mark the culprit, and what it reached, on MLflow's pages.")] = True,
    refresh: Refresh = False,
    as_json: AsJson = False,
) -> None:
    """Find the adaptation that broke a model, by testing its ancestors, and the steps in which it did."""
    from ringmaster.features.bisection.bisecting import Bisection, TestResults, parse_test

    with lineage_home(is_fresh=refresh, writes=record) as home:
        requested = parse_test(test)
        node = home.find(model)
        verdicts = TestResults.of(home.cache / "bisect", model=node.id, test=test)
        if forget:
            verdicts.forget()
        if verdicts.known:
            notice(f"continuing with {len(verdicts.known)} verdicts of an interrupted search; --anew forgets them")
        search = Bisection(home=home, test=requested, results=verdicts, every=every, show=notice)
        result = search.run(node)
        if not result.is_monotone:  # then training may have lost and found it again, too
            search = replace(search, every=True)
        culprits = [search.describe(culprit, checkpoints=checkpoints) for culprit in result.culprits]
        verdicts.forget()
        label = home.snapshot.label
        if as_json:
            fields = {"model": node.label, "test": test, "culprits": culprits, "is_monotone": result.is_monotone}
            answers = {label(id): is_good for id, is_good in result.verdicts.items()}
            print_json({**fields, "verdicts": answers, "untested": [label(id) for id in result.untested]})
        else:
            print_lines(output_console(), map(_sentence, culprits))
            if not result.is_monotone:
                notice("some good model came from a bad one: the fault came more than once, or was mended")
            if result.untested:
                notice(f"not tested, and passed over: {', '.join(map(label, result.untested))}")
        if record:
            for each in result.culprits:
                search.mark(each, test=test)


def _sentence(culprit: dict[str, Any]) -> str:
    outcome = (
        f" from {', '.join(culprit['parents'])}" if culprit["parents"] else ", which came from nothing that was tested"
    )
    data = ", ".join(dict.fromkeys(d["name"] for d in culprit["datasets"] if d["context"] == "training"))
    text = f"{culprit['child']} is where it broke: {culprit['kind']}{outcome}" + (f", on {data}" if data else "")
    if culprit["steps"]:
        ranges = [f"{each['last_good']} and {each['first_bad']}" for each in culprit["steps"]["every"]]
        text += f", between steps {', and again between '.join(ranges)}"
    if culprit["perhaps"]:
        text += f"; or it was one of those before it that cannot be tested: {', '.join(culprit['perhaps'])}"
    return text


COMMANDS = {"lineage": (bisect,)}
