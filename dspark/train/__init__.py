"""Make a drafter for any target from the target alone: it writes the data, and its hidden states teach."""

from __future__ import annotations

from dspark.train.command import train
from dspark.train.recipe import TrainRecipe, load_train_recipe

__all__ = ["TrainRecipe", "load_train_recipe", "train"]
