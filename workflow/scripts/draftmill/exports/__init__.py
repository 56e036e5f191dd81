"""The formats that trainers read, one module each. Every export takes tables of rows.MERGED and writes files."""
