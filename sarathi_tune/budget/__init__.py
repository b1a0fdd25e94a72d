"""From a step model and an SLO to a token budget: the rule of thumb, the derivation, the engines' rules and flags."""
