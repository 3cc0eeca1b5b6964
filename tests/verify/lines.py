"""Lines of text for judges."""

__all__ = ["LINES"]

LINES = (
    "a nice film",
    "what a waste of an evening, and of a good cast",
    "the soup was cold",
    "nobody in the village could say who had built the tower",
    "is there a bus to the airport on sundays?",
    "it rains",
    "two hours passed like ten minutes",
    "i would rather watch paint dry",
    "great value, quick delivery",
    "the clock in the hall strikes thirteen",
)
