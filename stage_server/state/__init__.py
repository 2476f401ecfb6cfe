"""How a stage's state comes and goes: loading, saving, joining, donating."""
