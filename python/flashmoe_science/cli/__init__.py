"""Commands for people; see flashmoe_science.__main__. Importing these modules costs next to nothing."""
