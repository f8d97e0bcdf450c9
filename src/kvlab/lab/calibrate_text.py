"""A calibration for people: what each part of a step takes, and how far predicted steps are off."""

from kvlab.lab.calibrate import Fit
from kvlab.lab.results.tables import new_table
from kvlab.lab.terminal import Terminal
from kvlab.simulation.work import TERMS


def show_fit(fit: Fit, console: Terminal) -> None:
    """Print the coefficients and the errors."""
    calibration = fit.calibration
    table = new_table("one", "takes, us", "95 % interval", "of the time")
    for term in TERMS:
        scale = 1e6 * term.per
        value, (low, high) = calibration.coefficients[term.name], fit.intervals[term.name]
        table.add_row(
            f"{term.per:,} {term.what}" if term.per > 1 else term.what,
            f"{value * scale:,.1f}",
            f"{low * scale:,.1f}-{high * scale:,.1f}",
            "not seen" if term.name in fit.unseen else f"{100 * fit.shares[term.name]:.1f} %",
        )
    table.add_row("wait for the next step", f"{calibration.between_s * 1e6:,.1f}", "", "")
    console.print(
        f"{calibration.subject} on {calibration.machine}, threads: {calibration.threads}; {fit.steps:,} steps\n"
    )
    console.print(table)
    for name, errors in (("where it was fitted", fit.residuals), (f"held out, {fit.parts}", fit.held_out)):
        console.print(
            f"{name}: a step is off by {100 * errors.median:.1f} % in the median, {100 * errors.p90:.1f} % at p90; "
            f"all together by {100 * errors.total:+.1f} %"
        )
