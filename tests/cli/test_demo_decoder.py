"""`lit-het demo` of a decoder: its page as a simulated user and as a real browser see it."""

import asyncio
import html
import re
import time

import numpy as np
import pytest

import lit_het
from lit_het.apps.demo import model as demo_model
from lit_het.apps.demo.model import MAX_ANSWERS, MAX_CHARACTERS, DemoDecoder, open_model
from lit_het.errors import UserError
from lit_het.texts import Written
from tests import tiny
from tests.cli.browser import assert_fits_and_contacts_no_other_machine, browser, served
from tests.cli.conftest import refusal
from tests.cli.test_demo import drop, ui, visit
from tests.cli.tiny_decoder import NAMES, QUESTION, pixels

COLOURS = ", ".join(tiny.COLOURS)
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="session")
def model(decoder):
    return open_model(decoder.run_dir, None)


@pytest.fixture(scope="session")
def image(decoder, tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / f"{NAMES[0]}.jpg"
    path.write_bytes(tiny.encode_jpeg(pixels(decoder, 1)[0]))
    return path


@pytest.fixture(scope="session")
def features(model, image):
    return model.see(image.read_bytes(), "image.jpg")[1]


def assert_same(found, expected):
    assert [text.text for text in found] == [text.text for text in expected]
    assert [text.tokens for text in found] == [text.tokens for text in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_p == pytest.approx(other.log_p, abs=1e-4)
        assert (one.bands is None) == (other.bands is None)
        if one.bands is not None:
            np.testing.assert_allclose(one.bands, other.bands, atol=1e-4)


@pytest.mark.slow
def test_a_page_gets_the_texts_of_caption_and_ask(model, decoder, image, features):
    assert isinstance(model, DemoDecoder)
    assert model.has_noise
    loaded = lit_het.load(decoder.run_dir)
    assert_same(model.caption(features, 1, 8, 3), loaded.caption(image, samples=8, seed=3))
    assert_same(model.caption(features, 3, 0, 0), loaded.caption(image, samples=0, num_texts=3))
    assert_same(model.ask(features, QUESTION, "", 1, 8, 3), loaded.ask(image, QUESTION, samples=8, seed=3))
    ranked = model.ask(features, QUESTION, COLOURS, 1, 8, 3)
    assert_same(ranked, loaded.ask(image, QUESTION, list(tiny.COLOURS), samples=8, seed=3))
    assert ranked[0].text == NAMES[0].split()[0]


MISTAKES = {
    "no question": ((" ", ""), "the question is empty; ask one"),
    "long question": (("colour " * 40, ""), "tokens, too many for the decoder's 24 positions; shorten it"),
    "long question with answers": (("colour " * 40, "red, blue"), "tokens, too many for the decoder's 24 positions"),
    "endless question": (("?" * 10**6, ""), f"1,000,000 characters, and may have {MAX_CHARACTERS:,}; shorten it"),
    "long answer": ((QUESTION, "red, " + "blue " * 30), "that the prompt leaves; shorten it"),
    "no answers": ((QUESTION, " , ,"), "no answers; give a list of at least one"),
    "answers twice": ((QUESTION, "red, blue, red"), "answer 'red' is repeated; keep one"),
    "long answers twice": ((QUESTION, ",".join(["red" * 1000] * 2)), "is repeated; keep one"),
    "many answers": ((QUESTION, ",".join(map(str, range(MAX_ANSWERS + 1)))), f"give at most {MAX_ANSWERS}"),
    "endless answers": ((QUESTION, "a," * 10**6), "the list of answers has 2,000,000 characters"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_answered_is_one_short_line(model, features, mistake):
    question, message = MISTAKES[mistake]
    begin = time.monotonic()
    with pytest.raises(UserError) as caught:
        model.ask(features, *question, 1, 0, 0)
    assert time.monotonic() - begin < 5
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("question", ["{question}", "\ud800 \x00 \u202e", "日本?", MARKUP, "%s {0} ${x}"])
def test_any_characters_are_a_question(model, features, question):
    assert len(model.ask(features, question[:12], "red, blue", 1, 0, 0)) == 2


def test_captions_to_search_are_no_use_to_a_decoder(capsys, decoder, tmp_path):
    pytest.importorskip("nicegui")
    (tmp_path / "captions.txt").write_text("a cat\n")
    line = refusal(capsys, "demo", "--checkpoint", decoder.run_dir, "--captions", tmp_path / "captions.txt")
    assert "is a decoder, which writes captions and searches none; leave out --captions" in line


def element(user, kind, label):
    """The element of a kind with a label, or with an option."""
    for one in user.find(kind).elements:
        if label in (one.props.get("label"), *(getattr(one, "options", None) or {}).values()):
            return one
    raise AssertionError(f"no {label!r} is visible")


def tokens(user):
    """The markup of the tokens of each text on the page."""
    return [one.content for one in user.find(ui().html).elements if "ruby" in one.content]


async def ask(user, question, answers=""):
    with user:
        element(user, ui().toggle, "Question").value = "question"
        element(user, ui().input, "Question").value = question
        element(user, ui().input, "Answers").value = answers
    user.find("Ask").click()


def test_a_user_reads_a_caption_asks_and_draws_again(model, image):
    async def script(user):
        await user.should_see("Drop an image.")
        await user.should_not_see("Ask")
        await drop(user, image.read_bytes())
        await user.should_see(NAMES[0], retries=100)
        await user.should_see("In brackets")
        (caption,) = tokens(user)
        assert "⏎" in caption
        assert re.search(r"<rt>\d+ \(\d+–\d+\)</rt>", caption)
        with user:
            element(user, ui().toggle, "Question").value = "question"
        await user.should_see("Write a question.", retries=100)
        await user.should_not_see(NAMES[0])
        await ask(user, QUESTION)
        await user.should_see(NAMES[0].split()[0], retries=100)
        await ask(user, QUESTION, COLOURS)
        for colour in tiny.COLOURS:
            await user.should_see(colour, retries=100)
        await user.should_not_see("Texts")  # as many as there are answers
        before = tokens(user)
        user.find("Draw again").click()
        for _ in range(100):
            await asyncio.sleep(0.1)
            if tokens(user) != before:
                break
        else:
            raise AssertionError("the same noise was drawn again")
        with user:
            element(user, ui().toggle, "none").value = 0
        await user.should_not_see("In brackets", retries=100)
        assert "(" not in "".join(tokens(user))

    visit(model, script)


def test_mistakes_are_messages_on_the_page_of_a_decoder(model, image):
    async def script(user):
        await drop(user, b"no image at all", f"{MARKUP}.png")
        await user.should_see(f"{MARKUP}.png: not an image", retries=100)
        await drop(user, image.read_bytes())
        await user.should_see(NAMES[0], retries=100)
        for mistake in MISTAKES.keys() - {"no question"}:
            question, message = MISTAKES[mistake]
            await ask(user, *question)
            await user.should_see(message, retries=100)
            await user.should_not_see("Under each token")
        await ask(user, "  ")
        await user.should_see("Write a question.", retries=100)
        await user.should_not_see("shorten it")
        await ask(user, QUESTION)
        await user.should_see("Under each token", retries=100)

    visit(model, script)


def test_of_many_clicks_the_last_is_answered_and_no_other_waits(model, image, monkeypatch):
    asked, inside, most = [], [], []

    def slow(self, features, question, *_):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.3)
        inside.pop()
        asked.append(question)
        return [Written(f"about {question}", -1.0, ("about", ""), (0.5, 0.5))]

    monkeypatch.setattr(demo_model.DemoDecoder, "ask", slow)

    async def script(user):
        await drop(user, image.read_bytes())
        await user.should_see(NAMES[0], retries=100)
        await ask(user, "0")
        await asyncio.sleep(0.1)
        for number in range(1, 20):
            await ask(user, str(number))
        await user.should_see("about 19", retries=100)
        await user.should_not_see("about 0")

    visit(model, script)
    assert asked[-1] == "19"
    assert len(asked) <= 3
    assert set(most) == {1}


def test_texts_are_never_markup(model, image, monkeypatch):
    hostile = Written(MARKUP, -1.0, (MARKUP, " <b>", ""), (0.5, 0.5, 0.5), ((0.4, 0.6),) * 3)
    monkeypatch.setattr(demo_model.DemoDecoder, "caption", lambda *_: [hostile])

    async def script(user):
        await drop(user, image.read_bytes())
        await user.should_see(MARKUP, retries=100)
        (shown,) = tokens(user)
        assert html.escape(MARKUP) in shown
        assert set(re.findall(r"<(\w+)", shown)) == {"ruby", "rt"}

    visit(model, script)


def test_a_head_without_noise_has_no_noise_samples(model, image, monkeypatch):
    monkeypatch.setattr(demo_model.DemoDecoder, "has_noise", False)

    async def script(user):
        await user.should_see("Texts")
        await user.should_not_see("Noise samples")
        await user.should_not_see("Draw again")
        await drop(user, image.read_bytes())
        await user.should_see(NAMES[0], retries=100)
        await user.should_not_see("In brackets")

    visit(model, script)


@pytest.mark.slow
def test_a_browser_shows_tokens_and_contacts_no_other_machine(decoder, image, tmp_path, monkeypatch):
    pytest.importorskip("nicegui")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with browser(tmp_path / "profile") as page, served("--checkpoint", decoder.run_dir) as address:
        page.look(1100, 800)
        page.open(address)
        page.wait_for("Drop an image")
        page.choose_file(image)
        page.wait_for(NAMES[0])
        page.wait_for("In brackets")
        page.screenshot(tmp_path / "caption.png")
        page.run("[...document.querySelectorAll('button')].find(one => one.innerText == 'Question').click()")
        page.wait_for("Write a question.")
        page.write("input[aria-label=Question]", QUESTION)
        page.write("input[aria-label=Answers]", f"{COLOURS}, <b>")
        page.run("[...document.querySelectorAll('button')].find(one => one.innerText == 'Ask').click()")
        page.wait_for("<unk>")  # a token that is no markup
        assert page.run("document.querySelectorAll('img[src=x]').length") == 0
        assert page.run("document.querySelectorAll('.tokens ruby').length") > 4
        assert_fits_and_contacts_no_other_machine(page, address, tmp_path)
