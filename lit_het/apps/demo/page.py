"""The page of ``lit-het demo`` for image-text models, and the server of all pages."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from nicegui import app, ui  # pyright: ignore[reportMissingImports]

from lit_het.apps.demo.base_page import NUM_SHOWN, BasePage
from lit_het.apps.demo.decoder_page import DecoderPage
from lit_het.apps.demo.guard import AllowedHosts, Guard
from lit_het.apps.demo.model import DemoDecoder, DemoModel
from lit_het.apps.demo.style import ICON
from lit_het.data_pipelines.texts.prompts import BARE_TEMPLATE, FAMILIES, PLACEHOLDER
from lit_het.eval.answers import Answer, NoiseRank
from lit_het.models.results import describe_information

_SAMPLES = (8, 32, 128, 512)
_RECONNECT_SECONDS = 60.0


def serve(model: DemoModel | DemoDecoder, host: str, port: int, allow_hosts: Sequence[str] = ()) -> None:
    """Serves the page until it is interrupted; it exchanges nothing with other machines."""
    app.add_middleware(Guard, allowed=AllowedHosts.of(host, allow_hosts))
    turn = asyncio.Lock()
    ui.run(
        lambda: show(model, turn),
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


def show(model: DemoModel | DemoDecoder, turn: asyncio.Lock | None = None) -> None:
    """Fills a browser window with the page of a model; arguments are those of `BasePage`."""
    if isinstance(model, DemoDecoder):
        DecoderPage(model, turn)
    else:
        Page(model, turn)


class Page(BasePage[DemoModel]):
    """The page of an image-text model."""

    def _add_questions(self) -> None:
        self._labels = ui.textarea("Labels", on_change=self._ask)
        self._labels.props("outlined autogrow debounce=500 hint='one a line, or between commas on one line'")
        self._prompts = ui.select(
            {name: _described(name) for name in FAMILIES}, value="bare", label="Prompts", on_change=self._ask
        ).props("outlined dense")
        chosen = self._model.samples
        self._add_sampling({samples: f"{samples}" for samples in sorted({*_SAMPLES, chosen})}, chosen)
        self._sampling.set_visibility(False)

    def _add_results(self) -> None:
        self._noise = ui.label().classes("noise")
        self._captions = ui.element("div")

    def _look(self, data: bytes, name: str) -> tuple[Any, Any, Any]:
        square, features = self._model.see(data, name)
        return square, features, (*self._model.noise(features), self._model.nearest(features))

    def _show_look(self, more: tuple[float, Sequence[NoiseRank], Sequence[tuple[str, float]]]) -> None:
        norm, ranks, nearest = more
        self._sampling.set_visibility(norm > 0)
        self._noise.set_text(_noise(norm, ranks))
        self._show_captions(nearest)

    def _missing_question(self) -> str:
        return "" if (self._labels.value or "").strip() else "write two labels or more"

    async def _respond(self, features: Float[np.ndarray, " f"]) -> None:
        question = self._labels.value or "", self._prompts.value, self._samples.value, self._seed
        found = await self._computed("ask", lambda: self._model.answer(features, *question))
        if found is not None:
            self._show_answer(*found)

    def _show_answer(self, labels: Sequence[str], answer: Answer, prediction_set: str) -> None:
        self._answer.clear()
        order = answer.order
        with self._answer:
            for place in order[:NUM_SHOWN]:
                with ui.element("div").classes("label"):
                    ui.label(labels[place]).classes("name")
                    ui.label(f"{answer.probability[place]:.1%}").classes("probability")
                    ui.html(_bar(answer, place), sanitize=False)  # numbers alone
                    if answer.noisy is not None:
                        ui.label(_with_noise(answer, answer.noisy, place)).classes("muted")
            with ui.element("div").classes("axis muted"):
                for part in (0, 0.5, 1):
                    ui.label(f"{100 * part * answer.scale:g}%")
            if len(rest := order[NUM_SHOWN:]):
                ui.label(f"and {len(rest):,} other labels with {answer.probability[rest].sum():.1%}").classes("muted")
            if answer.band is not None:
                ui.html(_LEGEND, sanitize=False)
            if answer.mutual_information is not None:
                ui.label(f"The {describe_information(answer.mutual_information)}.").classes("noise")
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
