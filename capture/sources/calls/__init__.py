"""How a model is called, where that is not its plain `forward`: as recorded, or with constants."""
