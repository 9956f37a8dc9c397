"""Ground floor: what every other package may import and that imports none of them."""
