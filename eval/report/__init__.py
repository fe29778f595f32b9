"""Self-contained HTML reports: functions that return markup, and a page of sections.

- `page`: text, facts, images, sections, and the whole page
- `style`: the style sheet
- `comparison`: two models side by side, for pages and the terminal
- `grids`: retrieval grids with images
- `figures`: curves, reliability diagrams, distributions
- `statements`: results as sentences
"""

from lit_het.eval.report.comparison import ComparedFigure, Comparison, compare, comparison_table
from lit_het.eval.report.figures import Chart, curves, distribution, reliability_diagrams
from lit_het.eval.report.grids import image_strip, image_to_name_grid, mark_legend
from lit_het.eval.report.page import (
    Html,
    Section,
    configuration,
    facts,
    paragraph,
    render_page,
    side_by_side,
)
from lit_het.eval.report.statements import describe_comparison, describe_group_errors, describe_rank_test

__all__ = [
    "Chart",
    "ComparedFigure",
    "Comparison",
    "Html",
    "Section",
    "compare",
    "comparison_table",
    "configuration",
    "curves",
    "describe_comparison",
    "describe_group_errors",
    "describe_rank_test",
    "distribution",
    "facts",
    "image_strip",
    "image_to_name_grid",
    "mark_legend",
    "paragraph",
    "reliability_diagrams",
    "render_page",
    "side_by_side",
]
