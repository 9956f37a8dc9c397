"""Where the weights of a big model live: sizes, budgets, plans, stores and loading."""
