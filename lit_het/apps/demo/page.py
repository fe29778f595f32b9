"""The page of ``lit-het demo``: the only module that loads the UI library, when a page is to be served."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from nicegui import app, events, run, ui  # pyright: ignore[reportMissingImports]
from PIL import Image

from lit_het.apps.demo.guard import MAX_UPLOAD_BYTES, AllowedHosts, Guard
from lit_het.apps.demo.model import DemoModel
from lit_het.apps.demo.style import ICON, STYLE
from lit_het.errors import UserError
from lit_het.eval.answers import Answer, NoiseRank
from lit_het.eval.prompts import BARE_TEMPLATE, FAMILIES, PLACEHOLDER

_SAMPLES = (8, 32, 128, 512)
_NUM_SHOWN = 12
_RECONNECT_SECONDS = 60.0


def serve(model: DemoModel, host: str, port: int, allow_hosts: Sequence[str] = ()) -> None:
    """Serves the page until it is interrupted; it exchanges nothing with other machines."""
    app.add_middleware(Guard, allowed=AllowedHosts.of(host, allow_hosts))
    turn = asyncio.Lock()
    ui.run(
        lambda: Page(model, turn),
        host=host,
        port=port,
        title="lit-het demo",
        favicon=ICON,
        dark=None,  # as the browser is set
        show=False,
        reload=False,
        show_welcome_message=False,
        # While JAX traces a program for many labels, the thread of the connection may wait for seconds: by default
        # the browser would give up after two, reload the page, and lose the image.
        reconnect_timeout=_RECONNECT_SECONDS,
    )


class Page:
    """The contents of one browser window.

    Args:
        model: answers.
        turn: held by the one window of all whose file is in memory.
    """

    def __init__(self, model: DemoModel, turn: asyncio.Lock | None = None):
        self._model, self._turn = model, turn or asyncio.Lock()
        self._features: Float[np.ndarray, " f"] | None = None
        self._seed = self._pending = 0
        self._numbers = Counter[str]()
        ui.add_css(STYLE)
        ui.colors(primary="#3f6284")
        with ui.element("main"):
            with ui.element("header"):
                ui.label("What does the model see, and how sure is it?").props("role=heading aria-level=1")
                ui.label(f"{model.run.run_dir.name}, {model.run.step:,} steps, {model.calibration}").classes("muted")
            with ui.element("div").classes("columns"):
                with ui.element("section").classes("asked"):
                    self._add_questions()
                with ui.element("section").props("aria-live=polite"):
                    self._busy = ui.linear_progress(show_value=False).props("indeterminate aria-label=computing")
                    self._busy.set_visibility(False)
                    self._problem = ui.label().classes("problem").props("role=alert")
                    self._problem.set_visibility(False)
                    self._hint = ui.label().classes("muted")
                    self._answer = ui.element("div")
                    self._noise = ui.label().classes("noise")
                    self._captions = ui.element("div")
        self._show_hint()

    def _add_questions(self) -> None:
        size = self._model.run.config.data.image_size
        self._upload = ui.upload(
            label="Drop an image here, or press +",
            auto_upload=True,
            max_file_size=MAX_UPLOAD_BYTES,
            on_upload=self._take,
            on_rejected=lambda: self._fail(f"only files below {MAX_UPLOAD_BYTES // 2**20} MB, one at a time"),
        ).props("flat bordered hide-upload-btn")
        with ui.element("figure") as self._figure:
            self._image = ui.image().props("no-spinner no-transition")
            ui.label(f"as the image tower sees it, {size} × {size}").classes("muted")
        self._figure.set_visibility(False)
        self._labels = ui.textarea("Labels", on_change=self._ask)
        self._labels.props("outlined autogrow debounce=500 hint='one a line, or between commas on one line'")
        self._prompts = ui.select(
            {name: _described(name) for name in FAMILIES}, value="bare", label="Prompts", on_change=self._ask
        ).props("outlined dense")
        with ui.element("div").classes("sampling") as self._sampling:
            ui.label("Noise samples")
            chosen = self._model.samples
            self._samples = ui.toggle(sorted({*_SAMPLES, chosen}), value=chosen, on_change=self._ask)
            self._samples.props("unelevated dense no-caps")
            ui.button("Draw again", on_click=self._draw_again).props("flat dense no-caps")
        self._sampling.set_visibility(False)

    async def _take(self, event: events.UploadEventArguments) -> None:
        """Looks at an image that was dropped."""
        self._upload.reset()
        async with self._turn:
            data, name = await event.file.read(), event.file.name
            looked = await self._computed("look", lambda: self._look(data, name))
            del data
        if looked is None:
            return
        square, self._features, norm, ranks, nearest = looked
        self._image.set_source(Image.fromarray(square))
        self._figure.set_visibility(True)
        self._sampling.set_visibility(norm > 0)
        self._noise.set_text(_noise(norm, ranks))
        self._show_captions(nearest)
        await self._ask()

    def _look(self, data: bytes, name: str) -> tuple[Any, ...]:
        square, features = self._model.see(data, name)
        return square, features, *self._model.noise(features), self._model.nearest(features)

    async def _ask(self) -> None:
        """Answers the newest question."""
        self._show_hint()
        features, labels = self._features, self._labels.value or ""
        if features is None or not labels.strip():
            self._numbers["ask"] += 1  # what is being computed has become pointless
            self._fail("")
            self._answer.clear()
            return
        question = labels, self._prompts.value, self._samples.value, self._seed
        found = await self._computed("ask", lambda: self._model.answer(features, *question))
        if found is not None:
            self._show_answer(*found)

    async def _draw_again(self) -> None:
        self._seed += 1
        await self._ask()

    async def _computed(self, kind: str, compute: Callable[[], Any]) -> Any:
        """Returns a result, or None where it failed or something newer of its kind was asked meanwhile."""
        number = self._numbers[kind] = self._numbers[kind] + 1
        found, problem = None, ""
        self._pending += 1
        self._busy.set_visibility(True)
        try:
            found = await run.io_bound(compute)
        except UserError as error:
            problem = str(error)
        finally:
            self._pending -= 1
            self._busy.set_visibility(self._pending > 0)
        if number != self._numbers[kind]:
            return None
        self._fail(problem)
        return found

    def _fail(self, problem: str) -> None:
        self._problem.set_text(problem)
        self._problem.set_visibility(bool(problem))
        if problem:
            self._answer.clear()

    def _show_hint(self) -> None:
        missing = [] if self._features is not None else ["drop an image"]
        missing += [] if (self._labels.value or "").strip() else ["write two labels or more"]
        self._hint.set_text(" and ".join(missing).capitalize() + "." if missing else "")
        self._hint.set_visibility(bool(missing))

    def _show_answer(self, labels: Sequence[str], answer: Answer, prediction_set: str) -> None:
        self._answer.clear()
        order = answer.order
        with self._answer:
            for place in order[:_NUM_SHOWN]:
                with ui.element("div").classes("label"):
                    ui.label(labels[place]).classes("name")
                    ui.label(f"{answer.probability[place]:.1%}").classes("probability")
                    ui.html(_bar(answer, place), sanitize=False)  # numbers alone
                    if answer.noisy is not None:
                        ui.label(_with_noise(answer, answer.noisy, place)).classes("muted")
            with ui.element("div").classes("axis muted"):
                for part in (0, 0.5, 1):
                    ui.label(f"{100 * part * answer.scale:g}%")
            if len(rest := order[_NUM_SHOWN:]):
                ui.label(f"and {len(rest):,} other labels with {answer.probability[rest].sum():.1%}").classes("muted")
            if answer.band is not None:
                ui.html(_LEGEND, sanitize=False)
            if prediction_set:
                ui.label(f"{prediction_set[0].upper()}{prediction_set[1:]}.").classes("noise")

    def _show_captions(self, nearest: Sequence[tuple[str, float]]) -> None:
        self._captions.clear()
        if not nearest:
            return
        with self._captions:
            ui.label("Nearest captions").props("role=heading aria-level=2")
            with ui.element("ol").classes("captions"):
                for caption, cosine in nearest:
                    with ui.element("li"):
                        ui.label(caption)
                        ui.label(f"{cosine:.3f}").classes("muted")


def _described(family: str) -> str:
    templates = FAMILIES[family]
    if templates == BARE_TEMPLATE:
        return "the labels alone"
    return templates[0].replace(PLACEHOLDER, "…") if len(templates) == 1 else f"{len(templates)} templates: {family}"


def _noise(norm: float, ranks: Sequence[NoiseRank]) -> str:
    if not norm:
        return "No noise: the head is deterministic for images."
    return f"Noise norm {norm:.3f}: {'; '.join(map(str, ranks))}." if ranks else f"Noise norm {norm:.3f}."


def _with_noise(answer: Answer, mean: Float[np.ndarray, " k"], place: int) -> str:
    if answer.band is None:
        return f"with noise {mean[place]:.1%}"
    low, high = answer.band[:, place]
    return f"with noise {mean[place]:.1%}, 90% of samples {low:.1%} – {high:.1%}"


def _bar(answer: Answer, place: int) -> str:
    """Draws a label: its probability solid, the band shaded, the mean a line, and a tick for each noise sample."""

    def x(probability: float | np.floating) -> str:
        return f"{1000 * probability / answer.scale:.1f}"

    drawn = [f'<rect class="bar" y="0" height="16" width="{x(answer.probability[place])}"/>']
    if answer.samples is not None and answer.band is not None and answer.noisy is not None:
        low, high = answer.band[:, place]
        drawn.append(f'<rect class="band" x="{x(low)}" y="3" height="10" width="{x(high - low)}"/>')
        drawn.append(f'<path class="mean" d="M{x(answer.noisy[place])} 0v16"/>')
        ticks = "".join(f"M{x(sample)} 19v6" for sample in answer.samples[:, place])
        drawn.append(f'<path class="ticks" d="{ticks}"/>')
    height = 16 if answer.band is None else 26
    return (
        f'<svg viewBox="0 0 1000 {height}" height="{height}" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(drawn)}</svg>"
    )


_LEGEND = """<p class="legend muted"><span><i class="bar"></i>without noise</span>
<span><i class="band"></i>90% of noise samples</span><span><i class="mean"></i>their mean</span>
<span><i class="tick"></i>each of them</span></p>"""
