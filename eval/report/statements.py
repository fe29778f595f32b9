"""Results as sentences, for pages and the terminal."""

from lit_het.eval.metrics.ambiguity import GroupErrors, RankTest
from lit_het.eval.report.comparison import Comparison
from lit_het.eval.report.naming import SIGNIFICANTLY


def describe_comparison(comparison: Comparison) -> str:
    """Returns on how many figures the candidate was significantly better, and on how many worse."""
    better, worse, neither = (comparison.count(winner) for winner in (1, -1, 0))
    return (
        f"{comparison.candidate} is significantly better than {comparison.baseline} on {better} of "
        f"{len(comparison.rows)} figures, and worse on {worse}; {neither} do not differ {SIGNIFICANTLY}."
    )


def describe_group_errors(errors: GroupErrors, model: str, group: str = "homoglyph group") -> str:
    """Returns the share of a model's errors within a group, with its chance level."""
    if not errors.errors:
        return f"{model} made no errors."
    return (
        f"{errors.share:.1%} of the {errors.errors:,} errors of {model} fall within a {group} "
        f"({errors.within:,}; {errors.chance:.2%} if errors were spread evenly over all classes)."
    )


def describe_rank_test(test: RankTest, first: str, second: str, what: str = "noise norm") -> str:
    """Returns which of two groups has the higher values, with the test and its effect size."""
    if test.p_value >= 0.05:
        finding = f"no significant difference in {what} between {first} and {second}"
    else:
        finding = f"{what} is {'higher' if test.auc > 0.5 else 'lower'} for {first} than for {second}"
    return (
        f"{finding[0].upper()}{finding[1:]}: median {test.first_median:.3g} (n = {test.first_count:,}) against "
        f"{test.second_median:.3g} (n = {test.second_count:,}); Mann-Whitney U = {test.statistic:,.0f}, "
        f"{_format_p(test.p_value)}, AUC = {test.auc:.3f}."
    )


def _format_p(p_value: float) -> str:
    """Formats a p-value; zero, where the float underflows, becomes a bound."""
    if p_value == 0:
        return "p < 1e-300"
    return f"p = {p_value:.3f}" if p_value >= 0.001 else f"p = {p_value:.1e}"
