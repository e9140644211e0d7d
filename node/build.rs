//! The migrations are compiled into the program; a new file there must rebuild it.

fn main() {
    println!("cargo:rerun-if-changed=../migrations");
}
