"""Open requests to generate a draft's training text with: none of them is among the demo's own."""

from __future__ import annotations

import random
from collections.abc import Iterator

PHENOMENA = (
    "the sea is salty", "leaves turn red in autumn", "we dream", "ice floats on water",
    "the moon changes its shape", "birds fly south in winter", "thunder comes after lightning",
    "bread rises in the oven", "cats purr", "the stars twinkle", "magnets stick to the fridge",
    "we have leap years", "soap makes bubbles", "the wind blows", "bees make honey", "we sneeze",
    "mountains have snow on top", "rainbows appear after rain", "we need sleep", "metal rusts",
)  # fmt: skip
TALES = (
    "a baker who loses her recipe book", "two brothers who build a raft",
    "a robot that learns to paint", "an old clock that runs backwards",
    "a girl who talks to the river", "a violinist on a night train",
    "a dog that finds its way home",
    "a village where it never rains", "a teacher on her last day of school",
    "a boy who plants a strange seed", "a thief who returns what he stole",
    "a postman in the mountains", "a king who cannot sleep", "a library that opens at midnight",
    "a sailor who is afraid of water", "a friendship between a fox and a crow",
)  # fmt: skip
KINDS = (
    "continents of the Earth", "months of the year", "primary colors", "oceans of the world",
    "five largest countries", "main organs of the human body", "states of matter",
    "seasons of the year", "instruments of an orchestra", "most common programming languages",
    "parts of a plant", "food groups", "senses of the human body", "layers of the Earth",
    "wonders of the ancient world", "types of clouds", "bones of the arm", "noble gases",
)  # fmt: skip
FUNCTIONS = (
    "returns the factorial of a number", "reverses a list", "counts the vowels of a string",
    "checks whether a number is prime", "returns the largest number of a list",
    "sums the digits of an integer", "merges two sorted lists", "removes duplicates from a list",
    "converts Celsius to Fahrenheit", "finds the longest word of a sentence",
    "computes the Fibonacci numbers", "counts how often each letter occurs",
    "checks whether two words are anagrams", "sorts a dictionary by its values",
    "flattens a nested list", "returns the greatest common divisor of two numbers",
    "splits a string into sentences", "rotates a matrix by 90 degrees",
)  # fmt: skip
DISHES = (
    "pancakes", "vegetable curry", "apple pie", "fried rice", "lentil stew", "chocolate cookies",
    "potato salad", "pizza dough", "mushroom risotto", "banana bread", "chicken noodle soup",
    "guacamole", "an omelette", "lemonade", "pasta with pesto", "roasted carrots",
)  # fmt: skip
CHOICES = (
    "living in a big city", "electric cars", "learning a second language", "owning a dog",
    "renting a flat", "online shopping", "solar energy", "school uniforms", "public transport",
    "working at night", "social media", "buying used clothes", "studying abroad", "wood heating",
    "open offices", "being self-employed",
)  # fmt: skip
ERRANDS = (
    "inviting the team to a farewell lunch", "asking for a day off next month",
    "thanking a customer for a long order", "reminding a friend of a borrowed book",
    "reporting a broken heater to the landlord", "applying for a summer job",
    "apologizing for a late delivery", "asking a teacher for feedback on an essay",
    "congratulating a colleague on a promotion", "declining an invitation to a conference",
    "asking the library to extend a loan", "announcing new opening hours",
)  # fmt: skip
WORKINGS = (
    "a plane flies", "a refrigerator cools", "a vaccine works", "an election is held",
    "a bridge carries its load", "glass is made", "a computer stores a picture",
    "a bank earns money", "rain forms", "a piano makes sound", "the heart pumps blood",
    "a compass finds north",
    "paper is recycled", "a microwave oven heats food", "photosynthesis feeds a plant",
    "a lock and key work",
)  # fmt: skip
SENTENCES = (
    "She sells sea shells by the sea shore.", "All good things come to those who wait.",
    "The rain in Spain stays mainly in the plain.", "A journey of a thousand miles begins here.",
    "My brother has seven red balloons.", "Nothing is as simple as it seems.",
    "The early bird catches the worm.", "We will meet again on Sunday morning.",
    "Pack my box with five dozen jugs.", "Every cloud has a silver lining.",
)  # fmt: skip
SCENES = (
    "a walk in the snow", "the first day of spring", "a busy market", "a quiet night in the desert",
    "an old garden", "a storm over the hills", "a train station at dawn", "a birthday party",
    "the harvest", "a city from above", "a campfire", "a river in autumn",
)  # fmt: skip
PAIRS = (
    "weather and climate", "a comet and an asteroid", "a fruit and a vegetable",
    "a simile and a metaphor", "RAM and storage", "a mammal and a reptile", "speed and velocity",
    "a loan and a mortgage", "an alligator and a crocodile", "a lake and a pond",
    "a list and a tuple in Python", "a novel and a short story", "heat and temperature",
    "a city and a town", "an atom and a molecule", "jam and marmalade",
)  # fmt: skip
BUSINESSES = (
    "a bookshop", "a bicycle repair shop", "a flower shop", "a coffee bar", "a toy store",
    "a dance school", "a pet hotel", "a software company", "a band", "a travel agency",
    "a barber shop", "a restaurant by the sea",
)  # fmt: skip

TEMPLATES = (
    ("Explain to a child why {}.", PHENOMENA),
    ("Write a short story about {}.", TALES),
    ("List the {}, each with one fact.", KINDS),
    ("Write a Python function that {}.", FUNCTIONS),
    ("Give me a recipe for {}, with amounts.", DISHES),
    ("What are the advantages and disadvantages of {}?", CHOICES),
    ("Write a polite email {}.", ERRANDS),
    ("Summarize how {}.", WORKINGS),
    ("Repeat this sentence five times: {}", SENTENCES),
    ("Describe {} in four lines that rhyme.", SCENES),
    ("Explain the difference between {}.", PAIRS),
    ("Suggest ten names for {}.", BUSINESSES),
)


def open_requests(seed: int) -> Iterator[str]:
    """Every request there is, the templates taking turns as long as each lasts."""
    shuffle = random.Random(seed).sample
    remaining = [(template, shuffle(topics, len(topics))) for template, topics in TEMPLATES]
    while remaining:
        for template, topics in remaining:
            yield template.format(topics.pop())
        remaining = [each for each in remaining if each[1]]
