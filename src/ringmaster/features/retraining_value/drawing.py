"""The decisions of one model as SVG: its metric, the forecast, the trainings, and what waiting and retraining cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

from ringmaster.features.retraining_value.value import RunObservation, ValueTerms, decide
from ringmaster.tasks.planning.gantt import round_step
from ringmaster.text import page_template

LEFT, RIGHT = 80, 920
METRIC_TOP, METRIC_BOTTOM = 84, 270
COST_TOP, COST_BOTTOM = 320, 440
MAX_DRAWN = 90
"""The most runs that are drawn, the newest ones."""
FORECAST_DAYS = 14
NUM_TICKS = 4
FIGURE = page_template("""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 490" width="960" height="490" \
role="img" aria-label="{{ title | xml }}">
<style>text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c}
.title{font-size:18px;font-weight:600}.note{font-size:13px;fill:#52616d}.tick{font-size:11px;fill:#52616d}
.grid{stroke:#dde3e8}.axis{stroke:#52616d}.dot{fill:#1f6f8b}.whisker{stroke:#1f6f8b;stroke-width:1;opacity:.5}
.forecast{stroke:#1f6f8b;stroke-width:2;stroke-dasharray:5 4;fill:none}.promoted{stroke:#2e8b57;stroke-width:2}
.rejected{stroke:#b23a48;stroke-width:2;stroke-dasharray:2 3}.waiting{fill:#c0702a}
.even{stroke:#22303c;stroke-width:1.6;fill:none}
</style>
<rect width="960" height="490" fill="#ffffff"/>
<text x="20" y="26" class="title">{{ title | xml(limit=90) }}</text>
<text x="20" y="48" class="note">{{ why | xml(limit=130) }}</text>
<circle cx="86" cy="66" r="3" class="dot"/><text x="94" y="70" class="note">{{ metric | xml(limit=24) }}</text>
<line x1="270" y1="66" x2="292" y2="66" class="forecast"/><text x="298" y="70" class="note">forecast without \
retraining</text>
<line x1="500" y1="58" x2="500" y2="72" class="promoted"/><text x="508" y="70" class="note">promoted</text>
<line x1="600" y1="58" x2="600" y2="72" class="rejected"/><text x="608" y="70" class="note">trained, not promoted</text>
{% for y, text in metric_ticks %}
<line x1="80" y1="{{ y }}" x2="920" y2="{{ y }}" class="grid"/>
<text x="72" y="{{ y + 4 }}" class="tick" text-anchor="end">{{ text }}</text>
{% endfor %}
{% for x, kind in trainings %}
<line x1="{{ x }}" y1="84" x2="{{ x }}" y2="440" class="{{ kind }}"/>
{% endfor %}
{% for dot in dots %}
<line x1="{{ dot.x }}" y1="{{ dot.low_y }}" x2="{{ dot.x }}" y2="{{ dot.high_y }}" class="whisker"/>
<circle cx="{{ dot.x }}" cy="{{ dot.y }}" r="3" class="dot"><title>{{ dot.title }}</title></circle>
{% endfor %}
{% if forecast %}<polyline points="{% for x, y in forecast %}{{ x }},{{ y }} {% endfor %}" class="forecast"/>{% endif %}
<text x="80" y="308" class="note">what a day of waiting costs, and (line) from which cost on retraining pays</text>
{% for y, text in cost_ticks %}
<line x1="80" y1="{{ y }}" x2="920" y2="{{ y }}" class="grid"/>
<text x="72" y="{{ y + 4 }}" class="tick" text-anchor="end">{{ text }}</text>
{% endfor %}
{% for bar in bars %}
<rect x="{{ bar.x - 3 }}" y="{{ bar.y }}" width="6" height="{{ bar.height }}" class="waiting">\
<title>{{ bar.title }}</title></rect>
{% endfor %}
{% if even %}<polyline points="{% for x, y in even %}{{ x }},{{ y }} {% endfor %}" class="even"/>{% endif %}
{% for x, text in days %}
<text x="{{ x }}" y="458" class="tick" text-anchor="middle">{{ text }}</text>
{% endfor %}
</svg>
""")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values between two ends to pixels."""

    low: float
    high: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        """Returns the pixel of a value."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.first + share * (self.last - self.first), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """The pixels and texts of a few round values."""
        step = round_step((self.high - self.low) / NUM_TICKS) if self.high > self.low else 1.0
        first = -(-self.low // step)
        values = [step * (first + index) for index in range(3 * NUM_TICKS)]
        return [(self(value), f"{value:.4g}") for value in values if value <= self.high]


def draw_value(title: str, metric: str, observations: Sequence[RunObservation], terms: ValueTerms) -> str:
    """Returns a drawing of the decisions of a model up to its last observation, of a metric that smaller is better.

    Raises ValueError if the champion was never measured.
    """
    first = max(len(observations) - MAX_DRAWN, 0)
    decided = [
        (each, decide([*observations[:i], replace(each, candidate=None)], terms))  # before it was trained
        for i, each in enumerate(observations)
        if i >= first
    ]
    shown = [(each.champion, decision) for each, decision in decided if each.champion and decision]
    if not shown:
        raise ValueError("the champion was never measured")
    last, now = shown[-1]
    base = last.value - now.excess
    ends = [(last.day + days, base + now.forecast(days)) for days in (0, FORECAST_DAYS)]
    values = [value for seen, _ in shown for value in (seen.value - seen.stderr, seen.value + seen.stderr)]
    values += [value for _, value in ends]
    costs = [cost for _, d in shown for cost in (d.waiting_cost, d.break_even_cost)]
    x = Scale(low=shown[0][0].day, high=last.day + FORECAST_DAYS, first=LEFT, last=RIGHT)
    y = Scale(low=min(values), high=max(values), first=METRIC_BOTTOM, last=METRIC_TOP)
    cost_y = Scale(low=min(0.0, *costs), high=max(costs), first=COST_BOTTOM, last=COST_TOP)
    return FIGURE.render(
        title=title,
        metric=metric,
        why=now.why,
        metric_ticks=y.ticks,
        cost_ticks=cost_y.ticks,
        dots=[
            {
                "x": x(seen.day),
                "y": y(seen.value),
                "low_y": y(seen.value - seen.stderr),
                "high_y": y(seen.value + seen.stderr),
                "title": f"{_date(seen.day)}: {seen.value:.4g}",
            }
            for seen, _ in shown
        ],
        forecast=[(x(day), y(value)) for day, value in ends],
        trainings=[
            (x(each.candidate.day), "promoted" if each.is_promoted else "rejected")
            for each, _ in decided
            if each.candidate and each.candidate.day >= shown[0][0].day
        ],
        bars=[
            {
                "x": x(seen.day),
                "y": min(cost_y(0.0), cost_y(decision.waiting_cost)),
                "height": abs(cost_y(0.0) - cost_y(decision.waiting_cost)),
                "title": f"{_date(seen.day)}: {decision.why}",
            }
            for seen, decision in shown
        ],
        even=[(x(seen.day), cost_y(decision.break_even_cost)) for seen, decision in shown],
        days=[(x(day), _date(day)) for day in _some_days(shown[0][0].day, last.day + FORECAST_DAYS)],
    )


def _some_days(first: int, last: int) -> list[int]:
    step = max(1, (last - first) // 6)
    return list(range(first, last + 1, step))


def _date(day: int) -> str:
    return date.fromordinal(day).isoformat()[5:]
