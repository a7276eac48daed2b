"""The cost curve and what is derived from it. It lives with the caps, which come before calibration; this is its name here."""

from dspark.caps.curve import CostCurve, DraftCost, Grid, Knee, nominal
from dspark.caps.price import Choice, PriceList, best_cap, choices, expected_tokens, price_list, speed_ups

__all__ = [
    "Choice",
    "CostCurve",
    "DraftCost",
    "Grid",
    "Knee",
    "PriceList",
    "best_cap",
    "choices",
    "expected_tokens",
    "nominal",
    "price_list",
    "speed_ups",
]
