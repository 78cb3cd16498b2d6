"""The truth benchmark: random models, trained on several ranks and on one, compared."""
