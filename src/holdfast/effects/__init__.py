"""What effects need besides their queue: rates that hold across pools."""
