"""The command that finds the adaptation that broke a model, and the steps of its training in which that happened."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ringmaster.flows.lineage.home import Model, Refresh, lineage_home
from ringmaster.flows.output import AsJson, error_console, output_console, print_json


def bisect(
    model: Model,
    test: Annotated[
        str,
        typer.Option(
            help="A shell command, given the model's folder, that ends with 0 for a good one, with 125 for one that "
            "cannot be tested; or loss<2.5."
        ),
    ],
    every: Annotated[bool, typer.Option("--all", help="Test all of them: faults may come and go.")] = False,
    checkpoints: Annotated[bool, typer.Option(help="Whether to search the culprit's checkpoints too.")] = True,
    anew: Annotated[bool, typer.Option("--anew", help="Forget what an interrupted search found out.")] = False,
    record: Annotated[bool, typer.Option(help="Whether MLflow's pages mark the culprit and what it reached.")] = True,
    refresh: Refresh = False,
    as_json: AsJson = False,
) -> None:
    """Find the adaptation that broke a model, by testing its ancestors, and the steps in which it did."""
    from ringmaster.flows.lineage.bisecting import Bisection, TestResults, parse_test

    def told(line: str) -> None:
        error_console().print(line)

    with lineage_home(is_fresh=refresh) as home:
        asked = parse_test(test)
        node = home.find(model)
        verdicts = TestResults.of(home.folder / "cache" / "bisect", model=node.id, test=test)
        if anew:
            verdicts.forget()
        if verdicts.known:
            told(f"going on with {len(verdicts.known)} verdicts of a search that was interrupted; --anew forgets them")
        search = Bisection(home=home, test=asked, results=verdicts, every=every, told=told)
        found = search.run(node)
        if not found.is_monotone:  # then training may have lost and found it again, too
            search = Bisection(home=home, test=asked, results=verdicts, every=True, told=told)
        culprits = [search.describe(culprit, checkpoints=checkpoints) for culprit in found.culprits]
        verdicts.forget()
        label = home.snapshot.label
        if as_json:
            said = {"model": node.label, "test": test, "culprits": culprits, "is_monotone": found.is_monotone}
            answers = {label(id): is_good for id, is_good in found.verdicts.items()}
            print_json({**said, "verdicts": answers, "untested": [label(id) for id in found.untested]})
        else:
            for culprit in culprits:
                output_console().print(_sentence(culprit), soft_wrap=True)
            if not found.is_monotone:
                told("some good model came from a bad one: the fault came more than once, or was mended")
            if found.untested:
                told(f"not tested, and passed over: {', '.join(map(label, found.untested))}")
        if record:
            for each in found.culprits:
                home.mark_culprit(each.child, test=test)


def _sentence(culprit: dict[str, Any]) -> str:
    came = (
        f" from {', '.join(culprit['parents'])}" if culprit["parents"] else ", which came from nothing that was tested"
    )
    data = ", ".join(dict.fromkeys(d["name"] for d in culprit["datasets"] if d["context"] == "training"))
    text = f"{culprit['child']} is where it broke: {culprit['kind']}{came}" + (f", on {data}" if data else "")
    if culprit["steps"]:
        ranges = [f"{each['last_good']} and {each['first_bad']}" for each in culprit["steps"]["every"]]
        text += f", between steps {', and again between '.join(ranges)}"
    if culprit["perhaps"]:
        text += f"; or it was one of those before it that cannot be tested: {', '.join(culprit['perhaps'])}"
    return text
