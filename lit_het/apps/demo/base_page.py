"""What the pages of all models share: the image, the progress, problems, and the frame around answers."""

import abc
import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from jaxtyping import Float
from nicegui import events, run, ui  # pyright: ignore[reportMissingImports]
from PIL import Image

from lit_het.apps.demo.guard import MAX_UPLOAD_BYTES
from lit_het.apps.demo.model import PageModel
from lit_het.apps.demo.style import STYLE
from lit_het.errors import UserError

NUM_SHOWN = 12
"""The most labels or answers that are shown."""

_Model = TypeVar("_Model", bound=PageModel)


class BasePage(abc.ABC, Generic[_Model]):
    """The contents of one browser window.

    Args:
        model: answers.
        turn: held by the one window of all whose file is in memory.
    """

    def __init__(self, model: _Model, turn: asyncio.Lock | None = None):
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
                    self._add_upload()
                    self._add_questions()
                with ui.element("section").props("aria-live=polite"):
                    self._busy = ui.linear_progress(show_value=False).props("indeterminate aria-label=computing")
                    self._busy.set_visibility(False)
                    self._problem = ui.label().classes("problem").props("role=alert")
                    self._problem.set_visibility(False)
                    self._hint = ui.label().classes("muted")
                    self._answer = ui.element("div")
                    self._add_results()
        self._show_hint(self._missing())

    # What the page of a kind of models adds.

    @abc.abstractmethod
    def _add_questions(self) -> None:
        """Adds what is asked about an image."""

    def _add_results(self) -> None:
        """Adds what is shown below answers."""

    @abc.abstractmethod
    def _missing_question(self) -> str:
        """Returns what the user has yet to write, as a request; empty if nothing."""

    def _look(self, data: bytes, name: str) -> tuple[Any, Any, Any]:
        """Returns an image's pixels, its features, and what `_show_look` needs."""
        return *self._model.see(data, name), None

    def _show_look(self, more: Any) -> None:
        """Shows what an image has without a question."""

    @abc.abstractmethod
    async def _respond(self, features: Float[np.ndarray, " f"]) -> None:
        """Answers a question about an image."""

    # What all pages do.

    def _add_upload(self) -> None:
        self._upload = ui.upload(
            label="Drop an image here, or press +",
            auto_upload=True,
            max_file_size=MAX_UPLOAD_BYTES,
            on_upload=self._take,
            on_rejected=lambda: self._fail(f"only files below {MAX_UPLOAD_BYTES // 2**20} MB, one at a time"),
        ).props("flat bordered hide-upload-btn")
        with ui.element("figure") as self._figure:
            self._image = ui.image().props("no-spinner no-transition")
            self._size = ui.label().classes("muted")
        self._figure.set_visibility(False)

    def _add_sampling(self, choices: Mapping[int, str], chosen: int) -> None:
        with ui.element("div").classes("sampling") as self._sampling:
            ui.label("Noise samples")
            self._samples = ui.toggle(dict(choices), value=chosen, on_change=self._ask)
            self._samples.props("unelevated dense no-caps")
            ui.button("Draw again", on_click=self._draw_again).props("flat dense no-caps")

    async def _take(self, event: events.UploadEventArguments) -> None:
        """Looks at an image that was dropped."""
        self._upload.reset()
        async with self._turn:
            data, name = await event.file.read(), event.file.name
            looked = await self._computed("look", lambda: self._look(data, name))
            del data
        if looked is None:
            return
        picture, self._features, more = looked
        self._image.set_source(Image.fromarray(picture))
        self._size.set_text(f"as the image tower sees it, {picture.shape[1]} × {picture.shape[0]}")
        self._figure.set_visibility(True)
        self._show_look(more)
        await self._ask()

    async def _ask(self) -> None:
        """Answers the newest question."""
        missing = self._missing()
        self._show_hint(missing)
        if self._features is None or missing:
            self._numbers["ask"] += 1  # what is being computed has become pointless
            self._fail("")
            self._answer.clear()
        else:
            await self._respond(self._features)

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

    def _missing(self) -> list[str]:
        """Returns what the user has yet to do, as requests."""
        return list(filter(None, ["" if self._features is not None else "drop an image", self._missing_question()]))

    def _show_hint(self, missing: list[str]) -> None:
        self._hint.set_text(" and ".join(missing).capitalize() + "." if missing else "")
        self._hint.set_visibility(bool(missing))
