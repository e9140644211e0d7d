//! The words of a closed list, said once.

/// A function from a value to its word, and a constant with every word that it can answer.
///
/// The list of a metric's label, of a table's column or of a message is then made from the same line
/// as the word itself, and a variant without a word does not compile.
///
/// ```
/// # use lockstep_schemas as schemas;
/// enum Colour { Red, Green(u8) }
/// impl Colour {
///     schemas::words! {
///         /// The word in metrics.
///         fn as_str(&self) in WORDS {
///             Colour::Red => "red",
///             Colour::Green(_) => "green",
///         }
///     }
/// }
/// assert_eq!(Colour::WORDS, ["red", "green"]);
/// assert_eq!(Colour::Green(3).as_str(), "green");
/// ```
#[macro_export]
macro_rules! words {
    ($(#[$doc:meta])* $vis:vis fn $name:ident(&self) in $words:ident {
        $($pattern:pat => $word:literal,)+
    }) => {
        /// Every word that there is.
        $vis const $words: &'static [&'static str] = &[$($word),+];
        $(#[$doc])*
        $vis const fn $name(&self) -> &'static str {
            match self { $($pattern => $word,)+ }
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident(self) in $words:ident {
        $($pattern:pat => $word:literal,)+
    }) => {
        /// Every word that there is.
        $vis const $words: &'static [&'static str] = &[$($word),+];
        $(#[$doc])*
        $vis const fn $name(self) -> &'static str {
            match self { $($pattern => $word,)+ }
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident($value:ident: $type:ty) in $words:ident {
        $($pattern:pat => $word:literal,)+
    }) => {
        /// Every word that there is.
        $vis const $words: &[&str] = &[$($word),+];
        $(#[$doc])*
        $vis const fn $name($value: $type) -> &'static str {
            match $value { $($pattern => $word,)+ }
        }
    };
}
