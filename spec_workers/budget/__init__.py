"""The budget of draft tokens: what steps cost, what drafts are worth, and the choice of nodes."""

from spec_workers.budget.budget import BudgetKind, DraftBudget, FixedBudget, SelectedDrafts
from spec_workers.budget.learned_budget import LearnedBudget

__all__ = ["BudgetKind", "DraftBudget", "FixedBudget", "LearnedBudget", "SelectedDrafts"]
