"""Records tokens and figures of the COCO caption evaluation: ``python tests/golden/record_captions.py FOLDER``.

Needs Java and, unpacked in FOLDER, the wheel of pycocoevalcap 1.2 (104 MB).
"""

# pyright: reportMissingImports=false

import json
import random
import sys
from pathlib import Path

CAPTIONS = """\
A man riding a wave on top of a surfboard.
Two dogs play with a red frisbee in the park.
a close up of a plate of food with broccoli
The kitchen has a stove, a sink, and a refrigerator.
A woman, wearing a hat, holds an umbrella; it rains.
There are three zebras: two adults and a baby!
Is this a train station?
WHAT a big cat!!
Why is the dog wearing shoes?!
A dog.A cat.
a bird , with spaces before the comma .
A boy doesn't want to eat his vegetables.
They don't know that it can't fly.
It's a sunny day and we're at the beach.
He'd said I'll come, but I've never seen them; I'm sure they'd wait.
ISN'T THIS THE CAT'S BED?
The girl's bike is next to the boys' bikes.
A man cannot lift the box.
He is gonna jump and she wanna watch
gimme that ball and lemme throw it, you gotta see
'Tis the season, 'twas a cold night.
Y'all ain't from here, are you?
She shouldn't've climbed that tree.
It’s the man’s dog, isn’t it?
don´t step on the grass
A rock'n'roll band plays rock 'n' roll.
a plate of mac 'n cheese and fish'n'chips
The clock says ten o'clock.
Ma'am, your hors d'oeuvre is ready.
A McDonald's sign next to an O'Brien's pub and D'Angelo's
N'Sync and L'Oréal posters, and a jack-o'-lantern
Get 'em while they're hot, 'cause the shop is open 'til nine.
c'mon, cap'n, eat your s'mores
A Hallowe'en party in Hawai'i
A black-and-white photo of a well-dressed man.
a ten-year-old boy in a t-shirt
A hot air balloon - seen from below - floats.
A dog -- a very big one -- sleeps.
A cat — or is it a fox? – hides.
A man jumps --- the crowd cheers ----- loudly
pre- and post-war buildings, non-smoking area
a semi- trailer -parked
Mother-in-law's house at mid-day
A B-52 and an F-16 fly over a 747.
about 1,000 people watch 1,000,000 lights
A 3.5 inch screen and a .5 litre bottle
A 5.5-inch phone on a 2.5-year-old laptop
He is 1.85m tall and weighs 80kg.
half of 1/2 and 3/4 of a cake
2 1/2 pizzas and 1 1/2 glasses
½ of a sandwich, 1½ cups and ¼ pint
It is 10:30 in the morning, or 10:30am.
At 9 a.m. and 5 p.m. the bus leaves.
At 9am or 5PM, open 24/7
Built in the 1950s, in '68, in the '90s, the mid-1990s or 1990's
A game from 9/11/2001 or 12-25-2010
The score is 21-14 and 3:2.
It is -5 degrees, or +5, or ±5.
a temperature of 20°C or 68° F
A 4x4 truck and a 2 x 4 board
A 5'10" man with a 12" sub and a 6' ladder
A 6ft. pole and a 10lb. fish
The 1st, 2nd, 3rd and 21st runner
Number 12 and #7 play, no. 5 rests, No. 10 runs
Players no. ten and No.4 shake hands.
50% off, 100 % wool
Call 555-1234 or (555) 123-4567 now
The years 1990 1995 and 2000
A sign that reads "Stop".
A sign reads “No Parking” and ‘Exit’
a store called 'Books' with a "sale
A shirt says ``hello'' on it
«Bonjour» says the poster
A man (left) and a woman (right)
A plate [white] with {blue} dots
a bus (number 5)(blue)
A box with 10" (25cm) sides.
Mr. and Mrs. Smith with Dr. Jones on St. Patrick's Day
Prof. Miller, Sen. Brown, Lt. Gray and Capt. Hook
Martin Luther King Jr. gives a speech.
The corner of 5th Ave. and Main St.
The U.S. flag. The U.K. flag, too.
U.S.-made cars in the U.S.A., in N.Y.C. and Washington D.C.
J.R.R. Tolkien and George W. Bush
Dogs, cats, etc. are in the yard, e.g. a poodle, i.e. a dog vs. a cat.
Apple Inc. and Sony Corp. logos
On Jan. 5 and Fri. Dec. 12 it snowed.
a car wash. A car Wash. and the mass. of people
Sat. and Sun. the shop is closed.
A bottle of vitamin C. The label is white.
A bottle of vitamin c.
An exhibit marked with an A. It is small.
A Ph.D. student at 7 a.m.
The volume is approx. 5 oz. or 3 in. high.
wait... what is that . . . thing
Wait… it is a bear…
hmm.. ok....
A café with crème brûlée and a piñata
Ünïcode naïve façade in São Paulo, Łódź and Reykjavík
日本語 の 看板 and Привет мир, καλημέρα
decomposed cafe\u0301 and nai\u0308ve
हिन्दी और العربية
It costs $5 or $3.50, US$10, €5, £4.99, ¥500 or 50¢.
a 5€ note and a $ sign
A and/or B, his/her, w/o a hat w/ shoes
A black/white cat and a km/h sign, n/a
either / or
a dog 😀 and a cat👍🏽dog ❤️ ☺
🎉🎉 party!!! 🎉
A ★ star → arrow • bullet ♥ heart ™ ® © symbols
:) a smiley :-( and ;) or :D <3
A man smiles :-)
Photo by @bob_99 #sunset #2 # hash
See http://www.example.com/a/b.html, or www.example.com.
Visit example.com today, mail me@example.com!
IMG_1234.JPG and photo.png or file 12.jpg
AT&T and B&B, R&B, M&M's and H&M
Tom & Jerry and salt &amp; pepper &lt;3 &quot;hi&quot; it&#39;s
C++ and C# books
2 + 2 = 4, a+b, x=5, 3 * 4 and 5 > 4 < 6
a * star ** and ~ tilde | pipe \\ back ^ hat _ line __ `tick`
foo_bar and some_file_name
<PERSON> walks with <PERSON> </s> <unk>
100m² of H₂O
a man , woman ,and child
hyphen-ated words- and -more words -
A "quoted, text." and (bracketed, text).
the dogs'.
What's this?It's a dog!Yes.
Mr.Smith goes to St.John
9-5 job, 9:00-5:00 hours
A level-A item vs plan B
The no. of people. no one
I.D. card of an A-list actor
e-mail, e-mail's, x-ray's and T-Rex
over-the-counter, state-of-the-art and man-made lakes.
ok., yes., "no."
a b c d e
the The THE tHe
a man a man a man a man

   leading and  double   spaces
tab\tseparated\tcaption
soft\u00adhyphen and no\u00a0break space
100,000.50 and 1.000,50
3-D glasses, 3D TV, 4K, 1080p, mp3
A street sign: Elm St., 5th Ave., and Oak Blvd.
''double'' and 'single' quotes'
Don't walk! WON'T stop. Can't go.
an apple's core and apples' skins
the '80s style and '05 vintage, class of '99
(c) 2010 John Doe Photography
o'clock O'Hare o'reilly's
The sign said, "Don't walk".
A  clock reads 12:05 p.m.
""".removesuffix("\n").split("\n")


def texts(random_: random.Random, words: list[str], count: int, longest: int) -> list[str]:
    """Returns texts of up to ``longest`` words."""
    return [" ".join(random_.choices(words, k=random_.randint(0, longest))) for _ in range(count)]


def random_set(seed: int, images: int, words: int, longest: int) -> tuple[list[str], list[list[str]]]:
    """Returns captions and one to five references for each, of so few words that n-grams repeat."""
    random_ = random.Random(seed)
    vocabulary = [f"w{number}" for number in range(words)]
    references = [texts(random_, vocabulary, random_.randint(1, 5), longest) for _ in range(images)]
    return texts(random_, vocabulary, images, longest), references


def sets(tokens: list[str]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Returns captions and references by name; of five recorded captions, four are the references of the first."""
    blocks = [tokens[start : start + 5] for start in range(0, len(tokens) - 4, 5)]
    cat, dog = "a cat sits on a mat", "a dog runs in the park"
    return {
        "captions": ([block[0] for block in blocks], [block[1:] for block in blocks]),
        "random": random_set(0, images=40, words=12, longest=12),
        "two words": random_set(1, images=15, words=2, longest=8),
        "many words": random_set(2, images=10, words=200, longest=15),
        "one image": ([cat], [[cat, dog]]),
        "shorter than four words": (["a cat", "a", "dog"], [[cat], [dog, cat], ["dog", dog]]),
        "empty caption": (["", dog], [[cat], [dog]]),
        "all captions empty": (["", ""], [[cat], [dog]]),
        "empty reference": ([cat, "", dog], [["", cat], [""], [dog]]),
        "equal references": ([cat, dog], [[cat] * 5, [cat, cat, dog]]),
        "nothing in common": (["x y z u v", "p q r s t"], [[cat], [dog]]),
        "longer and shorter": ([cat + " and sleeps there", "a dog"], [[cat, "a cat"], [dog, "a dog runs"]]),
    }


def main(folder: str) -> None:
    """Writes the file."""
    sys.path.insert(0, folder)
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    # Java reads all captions as one text; a letter between two keeps it from looking at the next one's first word.
    apart = {place: [{"caption": text}, {"caption": "x"}] for place, text in enumerate(CAPTIONS)}
    tokens = [found[0] for found in PTBTokenizer().tokenize(apart).values()]
    assert len(tokens) == len(CAPTIONS)
    recorded = {}
    for name, (hypotheses, references) in sets(tokens).items():
        expected, given = dict(enumerate(references)), {place: [text] for place, text in enumerate(hypotheses)}
        recorded[name] = {
            "hypotheses": hypotheses,
            "references": references,
            "bleu": Bleu(4).compute_score(expected, given, verbose=0)[0],
            "cider": Cider().compute_score(expected, given)[1].tolist(),
            "mean_cider": float(Cider().compute_score(expected, given)[0]),
            "rouge_l": Rouge().compute_score(expected, given)[1].tolist(),
            "mean_rouge_l": float(Rouge().compute_score(expected, given)[0]),
        }
    path = Path(__file__).parent / "captions.json"
    path.write_text(json.dumps({"captions": CAPTIONS, "tokens": tokens, "sets": recorded}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
