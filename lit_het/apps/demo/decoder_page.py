"""The page of ``lit-het demo`` for decoders: captions, and answers to questions."""

import asyncio
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from nicegui import ui  # pyright: ignore[reportMissingImports]

from lit_het.apps.demo.base_page import NUM_SHOWN, BasePage
from lit_het.apps.demo.model import MAX_CHARACTERS, DemoDecoder
from lit_het.eval.report.page import Html, joined
from lit_het.eval.report.texts import token
from lit_het.texts import Written

_SAMPLES = (8, 32, 128)
_CHOSEN_SAMPLES = 32
_NUM_TEXTS = (1, 3, 5)


class DecoderPage(BasePage[DemoDecoder]):
    """The page of a decoder."""

    def __init__(self, model: DemoDecoder, turn: asyncio.Lock | None = None):
        # Texts take seconds: one is written at a time, and of several questions that wait only the last.
        self._writing = asyncio.Lock()
        super().__init__(model, turn)

    def _add_questions(self) -> None:
        self._kind = ui.toggle({"caption": "Caption", "question": "Question"}, value="caption", on_change=self._ask)
        self._kind.props("unelevated dense no-caps spread")
        with ui.element("div").classes("asked") as asking:
            self._question = _field("Question", "such as: what is on the table?").on("keydown.enter", self._ask)
            self._answers = _field("Answers", "to rank, between commas; none to answer freely")
            self._answers.on("keydown.enter", self._ask)
            ui.button("Ask", on_click=self._ask).props("unelevated dense no-caps")
        asking.bind_visibility_from(self._kind, "value", value="question")
        with ui.element("div").classes("sampling") as self._several:
            ui.label("Texts")
            self._num_texts = ui.toggle({count: f"{count}" for count in _NUM_TEXTS}, value=1, on_change=self._ask)
            self._num_texts.props("unelevated dense no-caps")
        if self._model.has_noise:
            self._add_sampling({0: "none", **{samples: f"{samples}" for samples in _SAMPLES}}, _CHOSEN_SAMPLES)

    async def _ask(self) -> None:
        self._several.set_visibility(not self._given)
        await super()._ask()

    @property
    def _is_caption(self) -> bool:
        return self._kind.value == "caption"

    @property
    def _given(self) -> str:
        """The answers to rank; empty if texts are to be written."""
        return "" if self._is_caption else _text_of(self._answers)

    def _missing_question(self) -> str:
        return "" if self._is_caption or _text_of(self._question) else "write a question"

    async def _respond(self, features: Float[np.ndarray, " f"]) -> None:
        number = self._numbers["ask"] = self._numbers["ask"] + 1
        async with self._writing:
            if number != self._numbers["ask"]:
                return
            how = self._num_texts.value, self._samples.value if self._model.has_noise else 0, self._seed
            question = _text_of(self._question), self._given
            if self._is_caption:
                found = await self._computed("ask", lambda: self._model.caption(features, *how))
            else:
                found = await self._computed("ask", lambda: self._model.ask(features, *question, *how))
        if found is not None:
            self._show_texts(found)

    def _show_texts(self, texts: Sequence[Written]) -> None:
        self._answer.clear()
        with self._answer:
            for text in texts[:NUM_SHOWN]:
                with ui.element("div").classes("label"):
                    ui.label(text.text or "no words").classes("name" if text.text else "name muted")
                    ui.label(f"{text.probability:.2%}").classes("probability")
                    ui.html(_tokens(text), sanitize=False, tag="p").classes("tokens")  # escaped
            if rest := texts[NUM_SHOWN:]:
                probability = sum(text.probability for text in rest)
                ui.label(f"and {len(rest):,} other answers with {probability:.2%}").classes("muted")
            ui.label(_NOTE if texts[0].bands is None else f"{_NOTE} {_OF_BANDS}").classes("muted")


def _field(name: str, hint: str) -> ui.input:
    return ui.input(name).props(f"outlined dense maxlength={MAX_CHARACTERS} hint='{hint}'")


def _text_of(field: ui.input) -> str:
    return (field.value or "").strip()


def _tokens(text: Written) -> Html:
    bands = text.bands or [None] * len(text.tokens)
    return joined(token(*one) for one in zip(text.tokens, text.probabilities, bands, strict=True))


_NOTE = (
    "Right: the probability of the whole text. Under each token: its probability given those before it, in per cent; "
    "less probable ones are shaded, and ⏎ is the end."
)
_OF_BANDS = "In brackets: 5 – 95 % of the noise samples."
