"""The other libraries' norms, a module each; imported only where the library is installed."""
