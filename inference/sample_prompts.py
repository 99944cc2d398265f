"""Prompts to try a checkpoint with where the user gives none."""

SAMPLE_PROMPTS = (
    "Why is the sky blue?",
    "What is 17 times 23? Show how you get there.",
    "Write a Python function that reverses a linked list.",
    "List five capitals in South America, one on each line.",
    "Translate into French: The train leaves at nine tomorrow morning.",
    "Write a short poem about rain on a tin roof.",
    "Explain to a child what money is for.",
    "Give me a JSON object that describes a book: title, author, year, genres.",
    "Schreibe zwei Sätze über den Herbst.",
    "Continue the sequence and say what the rule is: 2, 3, 5, 8, 13",
    "A friend has lost her keys. What should she do first?",
    "Correct the mistakes: me and him goes too the store yesterday.",
)
"""Short and varied: facts, arithmetic, code, lists, other languages, verse."""
