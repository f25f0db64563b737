"""What tests are made of: naive models to compare with. Nothing in the package imports this."""
