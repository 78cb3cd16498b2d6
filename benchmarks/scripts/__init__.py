"""Scripts after the documentation of libraries, plain and with the lines that add autopar."""
