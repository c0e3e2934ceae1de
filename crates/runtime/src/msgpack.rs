//! MessagePack, as much of it as link carries: a checked, borrowed view of a payload, and a writer.
//!
//! No tree is built: `Value::check` walks a payload once, within bounds, and everything later reads from the same bytes.
//! So hostile input costs neither memory nor stack.

/// Containers inside containers, and entries of one container, that link accepts.
pub const MAX_DEPTH: usize = 16;
pub const MAX_ELEMENTS: u32 = 65_536;

enum Head<'a> {
    Nil,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    Array(u32),
    Map(u32),
}

fn take(bytes: &[u8], count: usize) -> Option<(&[u8], &[u8])> {
    bytes.split_at_checked(count)
}

/// A big-endian unsigned number of `size` bytes.
fn number(bytes: &[u8], size: usize) -> Option<(u64, &[u8])> {
    let (digits, rest) = take(bytes, size)?;
    Some((digits.iter().fold(0, |n, b| n << 8 | u64::from(*b)), rest))
}

fn sized(bytes: &[u8], size: usize) -> Option<(&[u8], &[u8])> {
    let (length, rest) = number(bytes, size)?;
    take(rest, length as usize)
}

/// The first thing of `bytes`; of a container only its count. None: cut off, or a code that link does not use.
fn head(bytes: &[u8]) -> Option<(Head<'_>, &[u8])> {
    let (&code, rest) = bytes.split_first()?;
    let low = usize::from(code);
    Some(match code {
        0x00..=0x7f => (Head::Uint(u64::from(code)), rest),
        0x80..=0x8f => (Head::Map(u32::from(code & 15)), rest),
        0x90..=0x9f => (Head::Array(u32::from(code & 15)), rest),
        0xa0..=0xbf => take(rest, low & 31).map(|(s, rest)| (Head::Str(s), rest))?,
        0xc0 => (Head::Nil, rest),
        0xc2 | 0xc3 => (Head::Bool(code == 0xc3), rest),
        0xc4..=0xc6 => sized(rest, 1 << (low - 0xc4)).map(|(b, rest)| (Head::Bin(b), rest))?,
        0xca => number(rest, 4).map(|(n, rest)| (Head::Float(f64::from(f32::from_bits(n as u32))), rest))?,
        0xcb => number(rest, 8).map(|(n, rest)| (Head::Float(f64::from_bits(n)), rest))?,
        0xcc..=0xcf => number(rest, 1 << (low - 0xcc)).map(|(n, rest)| (Head::Uint(n), rest))?,
        0xd0 => number(rest, 1).map(|(n, rest)| (Head::Int(i64::from(n as u8 as i8)), rest))?,
        0xd1 => number(rest, 2).map(|(n, rest)| (Head::Int(i64::from(n as u16 as i16)), rest))?,
        0xd2 => number(rest, 4).map(|(n, rest)| (Head::Int(i64::from(n as u32 as i32)), rest))?,
        0xd3 => number(rest, 8).map(|(n, rest)| (Head::Int(n as i64), rest))?,
        0xd9..=0xdb => sized(rest, 1 << (low - 0xd9)).map(|(s, rest)| (Head::Str(s), rest))?,
        0xdc | 0xdd => number(rest, 2 << (low - 0xdc)).map(|(n, rest)| (Head::Array(n as u32), rest))?,
        0xde | 0xdf => number(rest, 2 << (low - 0xde)).map(|(n, rest)| (Head::Map(n as u32), rest))?,
        0xe0..=0xff => (Head::Int(i64::from(code as i8)), rest),
        _ => return None,
    })
}

/// How many values follow the head as its content.
fn children(head: &Head) -> u64 {
    match head {
        Head::Array(count) => u64::from(*count),
        Head::Map(count) => 2 * u64::from(*count),
        _ => 0,
    }
}

/// What lies behind the first whole value of checked bytes.
fn skip(mut bytes: &[u8]) -> &[u8] {
    let mut open = 1u64;
    while open > 0 {
        let Some((first, rest)) = head(bytes) else { return &[] };
        open += children(&first);
        open -= 1;
        bytes = rest;
    }
    bytes
}

/// A value inside a checked payload.
#[derive(Clone, Copy)]
pub struct Value<'a>(&'a [u8]);

impl<'a> Value<'a> {
    /// `bytes` as exactly one value within link's bounds.
    pub fn check(bytes: &'a [u8]) -> Option<Value<'a>> {
        let mut left = [0u64; MAX_DEPTH + 1];
        let mut depth = 0;
        left[0] = 1;
        let mut rest = bytes;
        loop {
            while left[depth] == 0 {
                if depth == 0 {
                    return rest.is_empty().then_some(Value(bytes));
                }
                depth -= 1;
            }
            left[depth] -= 1;
            let (first, behind) = head(rest)?;
            rest = behind;
            match first {
                Head::Array(count) | Head::Map(count) => {
                    if count > MAX_ELEMENTS || depth == MAX_DEPTH {
                        return None;
                    }
                    depth += 1;
                    left[depth] = children(&first);
                }
                Head::Str(text) if std::str::from_utf8(text).is_err() => return None,
                _ => {}
            }
        }
    }

    fn head(self) -> Head<'a> {
        head(self.0).map_or(Head::Nil, |(head, _)| head)
    }

    pub fn is_nil(self) -> bool {
        matches!(self.head(), Head::Nil)
    }

    pub fn bool(self) -> Option<bool> {
        match self.head() {
            Head::Bool(value) => Some(value),
            _ => None,
        }
    }

    pub fn u64(self) -> Option<u64> {
        match self.head() {
            Head::Uint(value) => Some(value),
            Head::Int(value) => u64::try_from(value).ok(),
            _ => None,
        }
    }

    pub fn f64(self) -> Option<f64> {
        match self.head() {
            Head::Float(value) => Some(value),
            Head::Uint(value) => Some(value as f64),
            Head::Int(value) => Some(value as f64),
            _ => None,
        }
    }

    pub fn str(self) -> Option<&'a str> {
        match self.head() {
            Head::Str(text) => std::str::from_utf8(text).ok(),
            _ => None,
        }
    }

    /// Bytes; text counts as its UTF-8 bytes.
    pub fn bytes(self) -> Option<&'a [u8]> {
        match self.head() {
            Head::Str(bytes) | Head::Bin(bytes) => Some(bytes),
            _ => None,
        }
    }

    pub fn is_map(self) -> bool {
        matches!(self.head(), Head::Map(_))
    }

    /// The elements of an array; None when it is none.
    pub fn array(self) -> Option<Items<'a>> {
        match head(self.0) {
            Some((Head::Array(count), rest)) => Some(Items { left: u64::from(count), rest }),
            _ => None,
        }
    }

    /// Keys and values of a map in turn; None when it is none.
    pub fn entries(self) -> Option<Items<'a>> {
        match head(self.0) {
            Some((first @ Head::Map(_), rest)) => Some(Items { left: children(&first), rest }),
            _ => None,
        }
    }

    /// The value of a key of a map. A nil value is as good as none.
    pub fn get(self, key: &str) -> Option<Value<'a>> {
        let mut entries = self.entries()?;
        while let (Some(name), Some(value)) = (entries.next(), entries.next()) {
            if matches!(name.head(), Head::Str(text) if text == key.as_bytes()) {
                return (!value.is_nil()).then_some(value);
            }
        }
        None
    }
}

pub struct Items<'a> {
    left: u64,
    rest: &'a [u8],
}

impl<'a> Iterator for Items<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        let value = Value(self.rest);
        self.rest = skip(self.rest);
        Some(value)
    }
}

/// Writes values one behind the other: `Pack::default().map(1).str("size").uint(5)`.
#[derive(Default)]
pub struct Pack(pub Vec<u8>);

impl Pack {
    fn head(mut self, length: usize, fix: Option<(u8, usize)>, wide: [u8; 3]) -> Self {
        match (fix, length) {
            (Some((code, limit)), _) if length < limit => self.0.push(code | length as u8),
            (_, 0..=0xff) if wide[0] != 0 => self.0.extend_from_slice(&[wide[0], length as u8]),
            (_, 0..=0xffff) => {
                self.0.push(wide[1]);
                self.0.extend_from_slice(&(length as u16).to_be_bytes());
            }
            _ => {
                self.0.push(wide[2]);
                self.0.extend_from_slice(&(length as u32).to_be_bytes());
            }
        }
        self
    }

    pub fn map(self, count: usize) -> Self {
        self.head(count, Some((0x80, 16)), [0, 0xde, 0xdf])
    }

    pub fn array(self, count: usize) -> Self {
        self.head(count, Some((0x90, 16)), [0, 0xdc, 0xdd])
    }

    pub fn str(self, text: &str) -> Self {
        let mut pack = self.head(text.len(), Some((0xa0, 32)), [0xd9, 0xda, 0xdb]);
        pack.0.extend_from_slice(text.as_bytes());
        pack
    }

    pub fn bin(self, bytes: &[u8]) -> Self {
        let mut pack = self.head(bytes.len(), None, [0xc4, 0xc5, 0xc6]);
        pack.0.extend_from_slice(bytes);
        pack
    }

    pub fn nil(mut self) -> Self {
        self.0.push(0xc0);
        self
    }

    pub fn bool(mut self, value: bool) -> Self {
        self.0.push(0xc2 | u8::from(value));
        self
    }

    pub fn uint(mut self, value: u64) -> Self {
        if value < 128 {
            self.0.push(value as u8);
        } else {
            self.0.push(0xcf);
            self.0.extend_from_slice(&value.to_be_bytes());
        }
        self
    }

    pub fn float(mut self, value: f64) -> Self {
        self.0.push(0xcb);
        self.0.extend_from_slice(&value.to_bits().to_be_bytes());
        self
    }
}
