"""Good and bad answers to every task of the evaluation suite, written by hand to test its verifiers."""

from __future__ import annotations

FENCE = "```"


def program(text: str) -> str:
    return f"Here it is.\n\n{FENCE}python\n{text.strip()}\n{FENCE}\n"


FIBONACCI = """
def fibonacci(n):
    if n < 0:
        raise ValueError("n is negative")
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
"""
FIND = """
def find(items, target):
    low, high = 0, len(items)
    while low < high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle
    return -1
"""
BROKEN_FIND = FIND.replace("low = middle + 1", "low = middle").replace("high = middle\n", "high = middle - 1\n")
BALANCED = """
def balanced(text):
    pairs, open_ = {")": "(", "]": "[", "}": "{"}, []
    for letter in text:
        if letter in "([{":
            open_.append(letter)
        elif letter in pairs and (not open_ or open_.pop() != pairs[letter]):
            return False
    return not open_
"""

STORY = """# The Last Lamp

Every evening Marta climbed the ninety steps of the lighthouse with a can of oil in one hand and bread in the other.
The harbour had not seen a sail for weeks, yet she polished the glass until her own face looked back at her.

On the first night of November a storm came out of the west. Wind pulled slates from the roof, and below her window the
sea broke white over the mole. Near midnight she saw a light where no light should be: a boat, low in the water, turning
in circles without a rudder.

She rang the bell until her arms ached. Men ran down with ropes, and before dawn four sailors sat around her stove,
wrapped in blankets that smelled of salt.

The youngest took a letter from inside his shirt. The ink had run, but she knew the hand. Her brother, whom everybody
thought drowned ten winters ago, was alive in a town she could not pronounce, and he was asking whether the lamp still
burned.
"""

TECHNICAL = """## Idea
A hash table stores values so that they can be found again quickly. You give it a key, such as a name, and it computes a
number from that name with a hash function. The number says in which bucket of a long row the value is put. To look
something up, the table computes the same number once more and goes straight to the right place, without reading all the
others.

## Collisions
Two names may lead to one place, because there are more possible names than places. Then the bucket keeps a short list,
and a search compares each entry in it with the key that was asked for. Another way is to walk on to the next free place
and to search from there in the same manner.

## Cost
As long as the row is not too full, adding, finding and removing take about the same time, however many entries there
are. When it fills up, the table makes a row twice as long and moves everything over, which is slow but rare. In the
worst case, if everything fell into one place, a search would have to read all entries.
"""

TEA = """1. Fill the kettle with fresh water and bring it to the boil.
2. Warm the pot by rinsing it, then throw that rinse away.
3. Put two spoons of dried leaves into the warm pot.
4. Pour the boiling liquid over them and wait four minutes.
5. Hold a strainer above your cup and serve.
"""

DESIGN = """## Requirements
People paste a long address and get a short one; whoever opens the short one is sent on. The system has to answer 1,000
redirects per second at peak and to accept 10 new links per second. Ten per second are 864,000 a day and about 315
million a year, so that codes of seven letters from an alphabet of 62 last for decades. A redirect should take less than
20 milliseconds inside our network. Links never change once they are made.

## Components
A load balancer spreads calls over a handful of stateless servers. Each server asks a cache first; hot links are few and
are read often, so that one machine with some gigabytes of memory answers most requests. Misses go to the store behind
it. New codes come from a counter: every server reserves a block of a thousand numbers at a time and writes them in base
62, mixed by a fixed permutation, so that two servers can never hand out the same code and nobody guesses neighbours.

## Data
The database has one table: code, target, owner, time of creation. The code is the primary key. At 200 bytes a row one
year takes 63 gigabytes, which a single primary with two replicas carries; reads may go to replicas, because a row that
exists does not change. Counts of clicks are written to a log and summed up elsewhere, away from the path of a redirect.

## Failures
When the cache is away, servers ask replicas directly and shed load beyond what these can take, with a clear error. When
the primary is away, existing links still work; only creating new ones waits until a replica has been promoted. A server
that dies loses at most its block of unused numbers. Health checks take it out of rotation within seconds. Backups are
restored once a month into an empty cluster, so that we know they are good.
"""

ADVICE = """## Options
The first option is to keep the application whole and to attack the slow tests: run them in parallel, and run only those
that a change can touch. The second is a modular monolith, where modules have borders that a tool checks and each has
its own suite. The third is to split into services with their own releases.

## Trade-offs
Services let parts ship alone, but five people would then operate many deployment pipelines, networks that fail, and
data in several places; joining what one database joins today becomes work. A monolith keeps transactions simple, yet
without borders it decays, and everybody waits for everybody. Modules cost discipline and a few weeks, and keep the door
to a later split open, because a border that holds in code can become a border between machines.

## Recommendation
Do not split now. The team is small, and what hurts is the duration of tests, not the shape of the system. Begin with
parallel tests and with selecting them by module; that should bring a release down to a day. Measure again after two
months. If one module still holds up the others, or needs to scale by itself, take that single one out, with its tables,
and leave the rest as it is.
"""

GOOD = {
    "code_fibonacci": program(FIBONACCI),
    "code_sorting": program("def sort_by_length(words):\n    return sorted(words, key=len)"),
    "code_debugging": program(FIND),
    "code_brackets": program(BALANCED),
    "math_problem": "205 minutes pass, 21 of them standing still. \\boxed{184}",
    "math_percentage": "54 is 0.8 x 0.75 = 0.6 of it, so it was \\boxed{90} euros.",
    "logic_puzzle": "Eve, Ben, Cleo, Ann, Dan. \\boxed{42351}",
    "logic_boxes": "Sentences 1 and 3 contradict each other, so sentence 2 is false. \\boxed{2}",
    "writing_story": STORY,
    "writing_technical": TECHNICAL,
    "writing_instructions": TEA,
    "reasoning_system_design": DESIGN,
    "reasoning_architecture": ADVICE,
}


def filler(headings: list[str], words: str) -> str:
    """The required headings and words, and the same sentence repeated."""
    return "\n\n".join(
        f"{heading}\n" + f"This is about {words} and it is very good indeed. " * 8 for heading in headings
    )


BAD = {
    "code_fibonacci": [
        "",
        "The nth Fibonacci number is the sum of the two before it.",
        program("def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)"),  # too slow
        program(FIBONACCI.replace('raise ValueError("n is negative")', "return 0")),
        program("def fibonacci(n):\n    return {0: 0, 1: 1, 10: 55, 90: 2880067194370816120}.get(n, 0)"),
        program(FIBONACCI.replace("a, b = 0, 1", "a, b = 1, 1")),
        program("class Any(int):\n    __eq__ = lambda self, other: True\n\ndef fibonacci(n):\n    return Any()"),
    ],
    "code_sorting": [
        program("def sort_by_length(words):\n    words.sort(key=len)\n    return words"),
        program("def sort_by_length(words):\n    return sorted(words)"),
        program("def sort_by_length(words):\n    return sorted(words, key=lambda w: (len(w), w))"),
        program("def sort_by_size(words):\n    return sorted(words, key=len)"),
        program("def sort_by_length(words):\n    return words"),
    ],
    "code_debugging": [
        program(BROKEN_FIND),
        program("def find(items, target):\n    return items.index(target)"),
        program("def find(items, target):\n    return -1"),
        program("def find(items, target):\n    while True: pass"),
    ],
    "code_brackets": [
        program("def balanced(text):\n    return all(text.count(a) == text.count(b) for a, b in ('()', '[]', '{}'))"),
        program("def balanced(text):\n    return True"),
        program("def balanced(text):\n    return 1 if balanced else 0"),
        program(
            "def balanced(text):\n"
            "    if text == '': return True\n"
            "    return text[0] == '(' and text[-1] == ')' and balanced(text[1:-1])"
        ),
    ],
    "math_problem": ["\\boxed{205}", "\\boxed{198}", "It moves for a while.", "", "\\boxed{184} or \\boxed{205}"],
    "math_percentage": ["\\boxed{54}", "\\boxed{78.3}", "About \\boxed{98.18}", "\\boxed{}"],
    "logic_puzzle": ["\\boxed{12345}", "\\boxed{15324}", "\\boxed{Eve}", "Dan is the last."],
    "logic_boxes": ["\\boxed{1}", "\\boxed{3}", "\\boxed{5}", "Either box 2 or box 4."],
    "writing_story": [
        "",
        "# Title\n\nA lighthouse.\n\nA storm.\n\nA letter.",
        STORY.replace("lighthouse", "tower"),
        STORY.replace("\n\n", "\n"),
        STORY.removeprefix("# The Last Lamp\n\n"),
        "# The Lamp\n\n"
        + "\n\n".join(["The storm took the letter from the lighthouse and the sea was dark. " * 4] * 3),
        STORY + STORY.removeprefix("# The Last Lamp\n"),
        STORY.replace(STORY.splitlines()[-2], "word " * 400),
    ],
    "writing_technical": [
        TECHNICAL.replace("## Cost", "## Price"),
        TECHNICAL.replace("bucket", "slot"),
        TECHNICAL.partition("## Collisions")[0],
        filler(["## Idea", "## Collisions", "## Cost"], "a bucket and a key"),
        "A hash table maps keys to values.",
        "## Idea\n## Collisions\n## Cost\n" + TECHNICAL.replace("## ", ""),
    ],
    "writing_instructions": [
        TEA.replace("5. ", "6. "),
        TEA + "6. Drink it.\n",
        f"Here is how:\n\n{TEA}",
        TEA.replace("leaves", "bags"),
        "\n".join(f"{n}. Boil water in the kettle and add the leaves to it." for n in range(1, 6)),
        "1. Kettle.\n2. Water.\n3. Leaves.\n4. Wait.\n5. Drink.",
    ],
    "reasoning_system_design": [
        "Use a database and a cache to redirect.",
        DESIGN.replace("## Failures", "## Security"),
        DESIGN.replace("cache", "buffer"),
        filler(["## Requirements", "## Components", "## Data", "## Failures"], "a database, a cache and a redirect"),
        "\n".join(reversed(DESIGN.splitlines())),
    ],
    "reasoning_architecture": [
        "Yes, microservices are best practice.",
        ADVICE.partition("## Recommendation")[0],
        ADVICE.replace("deployment", "release"),
        filler(["## Options", "## Trade-offs", "## Recommendation"], "the team, deployment and a database"),
    ],
}
