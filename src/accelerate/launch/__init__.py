"""Start a script on one process or many: a plan that is pure, and the machinery that carries it out."""
