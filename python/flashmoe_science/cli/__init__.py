"""Commands for people; see flashmoe_science.__main__. Importing them costs next to nothing."""
