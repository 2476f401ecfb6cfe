"""How islands merge: the two linear forms, and what islands send each other for them."""
