"""The importance of parameters as SVG: two bars for each, one by each method."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringmaster.text import page_template

if TYPE_CHECKING:
    from ringmaster.features.importance.sweep import ParameterImportance

MAX_DRAWN = 12
"""The most parameters that are drawn, the most important ones."""
LEFT, WIDTH, TOP, ROW = 300, 560, 96, 44
"""The beginning of the bars and the length of the longest possible one, and the rows, in pixels."""
FIGURE = page_template("""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {{ height }}" width="960" height="{{ height }}" \
role="img" aria-label="{{ title | xml }}">
<style>text{font-family:system-ui,'DejaVu Sans',sans-serif;fill:#22303c}
.title{font-size:18px;font-weight:600}.note{font-size:13px;fill:#52616d}
.name{font-size:12px;font-weight:600;text-anchor:end}.tick{font-size:11px;fill:#52616d}
.axis{stroke:#52616d}.grid{stroke:#dde3e8}.ped_anova{fill:#c0702a}.fanova{fill:#1f6f8b}
</style>
<rect width="960" height="{{ height }}" fill="#ffffff"/>
<text x="20" y="26" class="title">{{ title | xml(limit=90) }}</text>
<rect x="20" y="37" width="18" height="9" class="ped_anova"/>
<text x="44" y="46" class="note">PED-ANOVA: where the best {{ importance.num_best }} are</text>
<rect x="304" y="37" width="18" height="9" class="fanova"/>
<text x="328" y="46" class="note">fANOVA: share of the variance</text>
<text x="940" y="46" class="note" text-anchor="end">for {{ importance.metric | xml }} \
after step {{ importance.step }}, {{ importance.num_trials }} trials</text>
{% for share in (0.25, 0.5, 0.75, 1.0) %}
<line x1="{{ left + share * width }}" y1="{{ top - 16 }}" x2="{{ left + share * width }}" y2="{{ height - 16 }}" \
class="grid"/>
<text x="{{ left + share * width }}" y="{{ top - 22 }}" class="tick" text-anchor="middle">\
{{ "%.0f %%" | format(100 * share) }}</text>
{% endfor %}
{% for key in keys %}
{% set y = top + loop.index0 * row %}
<text x="{{ left - 12 }}" y="{{ y + 19 }}" class="name">{{ key | xml(limit=40) }}</text>
{% for method, shares in (("ped_anova", importance.ped_anova), ("fanova", importance.fanova)) if key in shares %}
{% set bar_y = y + (0 if method == "ped_anova" else 16) %}
<rect x="{{ left }}" y="{{ bar_y }}" width="{{ "%.1f" | format(shares[key] * width) }}" height="13" \
class="{{ method }}"/>
<text x="{{ "%.1f" | format(left + shares[key] * width + 6) }}" y="{{ bar_y + 11 }}" class="tick">\
{{ "%.0f %%" | format(100 * shares[key]) }}</text>
{% endfor %}
{% endfor %}
<line x1="{{ left }}" y1="{{ top - 16 }}" x2="{{ left }}" y2="{{ height - 16 }}" class="axis"/>
{% if num_left %}<text x="940" y="{{ height - 4 }}" class="note" text-anchor="end">not drawn: {{ num_left }} \
of less importance</text>{% endif %}
</svg>
""")


def draw_bars(title: str, importance: ParameterImportance) -> str:
    """Returns a drawing of the importance of parameters."""
    keys = list(importance.ped_anova)
    shown = keys[:MAX_DRAWN]
    return FIGURE.render(
        title=title,
        importance=importance,
        keys=shown,
        num_left=len(keys) - len(shown),
        left=LEFT,
        width=WIDTH,
        top=TOP,
        row=ROW,
        height=TOP + ROW * len(shown) + 20,
    )
