"""Data of the two tasks: pictures of cats and dogs, and toxic comments in several languages."""

# --- Cats and dogs -------------------------------------------------------------------------


# --- Toxic comments ------------------------------------------------------------------------

